"""Any thread may call: saves and restores of one object take turns, and of saves to one path one wins."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import ckpt_core as ckpt
from tests.support import seams

QUICK = ckpt.Options(durable=False)
LONG_SECS = 60


def state_of(step: int) -> dict[str, Any]:
    return {f"w{n}": np.full(30_000, step * 100 + n, np.float64) for n in range(6)}


def is_state_of(step: int, loaded: Any) -> bool:
    wanted = state_of(step)
    return loaded.keys() == wanted.keys() and all((loaded[n] == wanted[n]).all() for n in wanted)


def all_at_once(*calls: Callable[[], None]) -> list[BaseException]:
    """Calls them in threads of their own that begin together; gives what they raised."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        start.wait(LONG_SECS)
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_SECS)
        assert not thread.is_alive()
    return raised


def test_saving_restoring_and_asking_at_once(tmp_path):
    with ckpt.Checkpointer(tmp_path, options=QUICK, max_to_keep=3) as checkpointer:
        checkpointer.save(0, state_of(0))

        def save() -> None:
            for step in range(1, 12):
                checkpointer.save(step, state_of(step))

        def restore() -> None:
            for _ in range(5):
                restored = checkpointer.restore_latest(state=state_of(0))
                assert restored is not None and is_state_of(restored.step, restored["state"])

        def ask() -> None:
            for _ in range(30):
                steps = checkpointer.all_steps()
                assert steps == sorted(steps)
                checkpointer.latest_step(), checkpointer.explain(), repr(checkpointer)
                checkpointer.wait_until_finished()

        checkpointer.wait_until_finished()
        assert all_at_once(save, restore, ask) == []
    assert checkpointer.all_steps() == [9, 10, 11]
    assert all(is_state_of(step, ckpt.load(tmp_path / str(step))) for step in (9, 10, 11))


def test_a_failure_is_raised_in_one_thread(tmp_path, monkeypatch):
    checkpointer = ckpt.Checkpointer(tmp_path, options=QUICK)
    for number in range(5):
        with monkeypatch.context() as now:
            seams.at(now, "record", before=seams.fail())
            checkpointer.save(number, {"n": number})
            raised = all_at_once(*[checkpointer.wait_until_finished] * 4)
        assert [type(error) for error in raised] == [OSError]
    checkpointer.close()


def test_saves_to_one_path(tmp_path):
    """One of them is there, and the others raise."""
    path, done = tmp_path / "a", []

    def save(number: int) -> None:
        ckpt.save(path, state_of(number), options=QUICK)
        done.append(number)

    raised = all_at_once(*[lambda number=number: save(number) for number in range(3)])
    assert len(done) == 1 and {type(error) for error in raised} == {ckpt.CheckpointExists}
    assert is_state_of(done[0], ckpt.load(path))
    assert os.listdir(tmp_path) == ["a"]


def test_a_call_from_within_a_call_is_refused(tmp_path):
    """A handler that saves, while a save is at work: to wait for it would be for ever. Between calls it may."""
    told: list[str] = []

    def handler(*_: Any) -> None:
        try:
            assert checkpointer.save(7, {"n": 7})
        except ckpt.CheckpointError as error:
            told.append(str(error))

    def policy(step: int, context: Any) -> bool:
        if step == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        return True

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with ckpt.Checkpointer(tmp_path, save_policy=policy, options=QUICK) as checkpointer:
            checkpointer.save(0, {"n": 0})
            checkpointer.save(1, {"n": 1})
            assert len(told) == 1 and "save()" in told[0] and "called from within" in told[0]
            os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(told) == 1 and checkpointer.all_steps() == [0, 1, 7]
