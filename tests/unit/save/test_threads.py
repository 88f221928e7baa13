"""One object, or one path, used by several threads at once."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._background import threads
from ckpt_core._background.threads import run_each
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


def test_threads_that_save_to_one_checkpointer(tmp_path: Path) -> None:
    """Staging memory, the save in flight and the policies' memory are shared: every step holds its own."""
    saved: set[int] = set()
    counter, counting = iter(range(10_000)), threading.Lock()
    with ckpt.Checkpointer(tmp_path, options=QUICK) as checkpointer:

        def save() -> None:
            for _ in range(8):
                with counting:
                    step = next(counter)
                try:
                    if checkpointer.save(step, state_of(step)):
                        saved.add(step)
                except ckpt.CheckpointExists:
                    pass  # the other thread was faster, with a newer one

        assert all_at_once(save, save, save) == []
    assert len(saved) > 8 and set(checkpointer.all_steps()) == saved
    for step in saved:
        assert is_state_of(step, ckpt.load(tmp_path / str(step))), step


def test_saving_restoring_asking_and_deleting_at_once(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, options=QUICK, max_to_keep=3) as checkpointer:
        checkpointer.save(0, state_of(0))
        begun = threading.Event()

        def save() -> None:
            for step in range(1, 20):
                checkpointer.save(step, state_of(step))
                begun.set()

        def restore() -> None:
            assert begun.wait(LONG_SECS)
            for _ in range(8):
                restored = checkpointer.restore_latest(state=state_of(0))
                assert restored is not None and is_state_of(restored.step, restored["state"])

        def ask() -> None:
            for _ in range(60):
                steps = checkpointer.all_steps()
                assert steps == sorted(steps)
                checkpointer.latest_step(), checkpointer.explain(), repr(checkpointer)
                checkpointer.wait_until_finished()

        assert all_at_once(save, restore, ask) == []
    assert checkpointer.all_steps() == [17, 18, 19]
    assert all(is_state_of(step, ckpt.load(tmp_path / str(step))) for step in (17, 18, 19))


def test_a_failure_is_raised_in_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = ckpt.Checkpointer(tmp_path, options=QUICK)
    for number in range(10):
        with monkeypatch.context() as now:
            seams.at(now, "record", before=seams.fail())
            checkpointer.save(number, {"n": number})
            raised = all_at_once(*[checkpointer.wait_until_finished] * 4)
        assert [type(error) for error in raised] == [OSError]
    checkpointer.close()


def test_results_of_one_save_in_many_threads(tmp_path: Path) -> None:
    pending = ckpt.save_async(tmp_path / "a", state_of(1), options=QUICK)
    assert all_at_once(*[lambda: pending.result(LONG_SECS)] * 6) == []
    loading = ckpt.load_async(tmp_path / "a")
    values: list[Any] = []
    assert all_at_once(*[lambda: values.append(loading.result(LONG_SECS))] * 6) == []
    assert len(values) == 6 and all(value is values[0] for value in values)


def test_a_call_from_within_a_call_is_refused(tmp_path: Path) -> None:
    """A handler that saves, while a save is at work: to wait for it would be for ever."""
    told: list[str] = []

    def handler(*_: Any) -> None:
        with pytest.raises(ckpt.CheckpointError, match="called from within") as caught:
            checkpointer.save(7, {"n": 7})
        told.append(str(caught.value))

    def policy(step: int, context: Any) -> bool:
        if step == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        return True

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with ckpt.Checkpointer(tmp_path, save_policy=policy, options=QUICK) as checkpointer:
            checkpointer.save(0, {"n": 0})
            checkpointer.save(1, {"n": 1})
            checkpointer.save(2, {"n": 2})
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(told) == 1 and "save()" in told[0]
    assert checkpointer.all_steps() == [0, 1, 2]


def test_a_handler_may_save_between_calls(tmp_path: Path) -> None:
    def handler(*_: Any) -> None:
        assert checkpointer.save(7, {"n": 7})

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with ckpt.Checkpointer(tmp_path, options=QUICK) as checkpointer:
            checkpointer.save(0, {"n": 0})
            os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert checkpointer.all_steps() == [0, 7]


# ---- one path -----------------------------------------------------------------------------------


def test_saves_to_one_path(tmp_path: Path) -> None:
    """One of them is there, and the others raise."""
    for turn in range(6):
        path, done = tmp_path / str(turn), []

        def save(number: int, path: Path = path, done: list[int] = done) -> None:
            ckpt.save(path, state_of(number), options=QUICK)
            done.append(number)

        raised = all_at_once(*[lambda number=number: save(number) for number in range(3)])
        assert len(done) == 1 and {type(error) for error in raised} == {ckpt.CheckpointExists}
        assert is_state_of(done[0], ckpt.load(path))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_path_that_is_replaced_while_others_read_it(tmp_path: Path) -> None:
    """Every load has one whole state, or says that it was replaced meanwhile, never that it is damaged."""
    path = tmp_path / "a"
    ckpt.save(path, state_of(0), options=QUICK)
    over = threading.Event()

    def replace() -> None:
        try:
            for number in range(1, 25):
                ckpt.save(path, state_of(number), overwrite=True, options=QUICK)
        finally:
            over.set()

    def read() -> None:
        while not over.is_set():
            try:
                loaded = ckpt.load(path)
            except ckpt.CheckpointNotFound:
                continue
            assert is_state_of(int(loaded["w0"][0]) // 100, loaded)

    assert all_at_once(replace, read, read) == []
    assert is_state_of(24, ckpt.load(path))
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_where_no_worker_starts_the_one_that_starts_them_works(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    start, found = threading.Thread.start, list[list[int]]()

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("ckpt-some"):
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)

    def work() -> None:
        found.append(run_each(lambda n: n + 1, range(9), 4, "ckpt-some"))

    caller = threading.Thread(target=work, daemon=True)
    caller.start()
    caller.join(20)
    assert found == [[*range(1, 10)]]


@pytest.mark.parametrize("lost", ["all", "all but one"])
def test_workers_that_are_lost_while_they_start(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """A thread that finds no memory for its first line ends without a word; who started it waits for ever."""
    monkeypatch.setattr(threads, "_LOOK_SECS", 0.02)
    monkeypatch.setattr(threads, "_START_SECS", 0.1)

    def launch(owner: Any, jobs: Any, ends: Any, begun: Any, name: str) -> None:
        if lost == "all but one":
            threads._work(owner, jobs, ends[0], begun)

    monkeypatch.setattr(threads, "_launch", launch)
    assert run_each(lambda one: one + 1, range(20), 3, "ckpt-test") == [*range(1, 21)]


def test_a_pool_that_an_interrupt_left_behind_runs_nothing_more() -> None:
    pool = threads.Workers(1, "ckpt-left")
    begun, go_on, ran = threading.Event(), threading.Event(), list[int]()
    pool.submit(lambda: (begun.set(), go_on.wait(LONG_SECS)))
    later = pool.submit(lambda: ran.append(1))
    assert begun.wait(LONG_SECS)
    del pool, later
    left = [one for one in threading.enumerate() if one.name.startswith("ckpt-left")]
    go_on.set()
    for thread in left:
        thread.join(LONG_SECS)
    assert len(left) == 1 and not left[0].is_alive() and ran == []
