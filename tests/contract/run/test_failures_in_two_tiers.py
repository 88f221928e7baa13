"""A disk that fails in one of two tiers: before a call is acknowledged all see the old value, and then all see the new one."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import seams

ONE_HUNDREDTH = ckpt.Options(
    persist_policy=ckpt.when.every_steps(100), durable=False, local_max_to_keep=5
)


class Run:
    def __init__(self, root: Path) -> None:
        self.root, self.persistent, self.local = root, root / "run", root / "local"

    def start(self, **more: Any) -> ckpt.Checkpointer:
        more = {"options": ONE_HUNDREDTH, "asynchronous": False} | more
        return ckpt.Checkpointer(self.persistent, local_directory=self.local, **more)

    def begun(self, *steps: int) -> ckpt.Checkpointer:
        checkpointer = self.start()
        for step in steps:
            save(checkpointer, step, step)
        return checkpointer

    def values(self) -> list[dict[int, int]]:
        """What a restart finds, and what whoever knows of no local directory does."""
        with self.start(read_only=True) as both:
            shown = {step: both.load(step)["n"] for step in both.all_steps()}
            assert resume(both) == max(shown.items())
        return [shown, self.persistent_values()]

    def persistent_values(self) -> dict[int, int]:
        with ckpt.Checkpointer(self.persistent, read_only=True) as tool:
            return {step: tool.load(step)["n"] for step in tool.all_steps()}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def save(checkpointer: ckpt.Checkpointer, step: int, value: int, **more: Any) -> None:
    assert checkpointer.save(step, {"n": value}, **more)
    checkpointer.wait_until_finished()


def resume(checkpointer: ckpt.Checkpointer) -> tuple[int | None, int]:
    restored = checkpointer.restore_latest(state={"n": 0})
    return restored.step, restored["state"]["n"]


def fails(
    checkpointer: ckpt.Checkpointer,
    place: Path,
    point: seams.Point,
    step: int,
    value: int,
    **how: Any,
) -> None:
    """A save while the disk below ``place`` fails at this moment."""
    with pytest.MonkeyPatch.context() as patch:
        broken = seams.fail(OSError, "the disk is gone")
        seams.at(patch, point, before=broken, where=seams.below(place))
        with pytest.raises(OSError, match="the disk is gone") as failure:
            save(checkpointer, step, value, **how)
    # the one reason
    assert "replaced" not in str(getattr(failure.value, "__notes__", ""))


# ---- overwriting saves ---------------------------------------------------------------------------

# the newest step, the tier that fails and when, how it is saved -> its value in both tiers, in the persistent one
OVERWRITES: list[tuple[int, str, seams.Point, dict[str, bool], int, int | None]] = [
    (100, "run", "commit", {}, 100, 100),
    (100, "local", "commit", {}, -100, -100),
    (100, "local", "record", {}, -100, -100),
    (101, "local", "commit", {}, 101, None),
    (101, "local", "record", {}, 101, None),
    (101, "", "commit", {"force": True}, 101, None),
    (101, "run", "commit", {"force": True}, 101, None),
    (101, "local", "commit", {"force": True}, -101, -101),
]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("step", "tier", "point", "how", "both", "persistent"), OVERWRITES)
def test_an_overwrite_that_fails_in_a_tier(
    run, asynchronous, step, tier, point, how, both, persistent
):
    """It was forgotten, or the fast directory had the new value until the local copy was gone."""
    run.begun(*range(100, step + 1)).close()
    before = {n: n for n in range(100, step)}
    alone = {n: n for n in range(100, step) if n == 100}
    with run.start(asynchronous=asynchronous) as checkpointer:
        assert resume(checkpointer) == (step, step)
        fails(checkpointer, run.root / tier, point, step, -step, overwrite=True, **how)
        assert run.values()[0] == before | {step: both}
        assert run.values()[1] == alone | ({} if persistent is None else {step: persistent})
        assert checkpointer.load(step)["n"] == both
        if both == step:
            assert not checkpointer.save(step, {"n": 9})  # it is saved already
        save(checkpointer, 102, 102)
        assert run.values()[0] == before | {step: both, 102: 102}
        save(checkpointer, step, 200, overwrite=True, force=True)
        assert run.values() == [before | {step: 200, 102: 102}, alone | {step: 200}]


def test_a_forced_save_that_fails_leaves_the_local_one(run: Run) -> None:
    """The local one is replaced when the persistent one is there: in between, one of the two is always whole."""
    with run.begun(100, 101) as checkpointer:
        fails(checkpointer, run.persistent, "commit", 101, -101, force=True)
        assert checkpointer.load(101)["n"] == 101
        save(checkpointer, 101, 102, force=True)
        assert run.values() == [{100: 100, 101: 102}] * 2


def test_no_older_copy_comes_back_when_retention_has_taken_the_new_one(run: Run) -> None:
    """The old local copy is intact, and was the only one of its number then."""
    run.begun(100).close()
    with run.start(max_to_keep=1) as checkpointer:
        assert resume(checkpointer) == (100, 100)
        fails(checkpointer, run.local, "record", 100, -100, overwrite=True)
        save(checkpointer, 101, 101, force=True)
        assert checkpointer.all_steps() == [101]
    assert run.values() == [{101: 101}] * 2


@pytest.mark.parametrize("overwrites", ["another host", "a tool"])
@pytest.mark.parametrize("away", [True, False])
def test_an_older_copy_on_another_host_does_not_come_back(run, overwrites, away):
    """The newer save of its number is gone, in all tiers of the host that made it."""
    run.begun(100).close()
    elsewhere = run.root / "elsewhere" if overwrites == "another host" else None
    options = ONE_HUNDREDTH if elsewhere else None
    with ckpt.Checkpointer(
        run.persistent, local_directory=elsewhere, max_to_keep=1, options=options
    ) as other:
        assert resume(other) == (100, 100)
        save(other, 100, -100, overwrite=True)
        if away:
            for step in (101, 102, 103, 104, 105):
                save(other, step, step, force=True)
    assert run.values() == [{105: 105} if away else {100: -100}] * 2
    with run.start(max_to_keep=1) as back:
        resume(back)
        save(back, 106, 106, force=True)
        assert back.all_steps() == [106]
    assert run.values() == [{106: 106}] * 2


@pytest.mark.parametrize("step", [100, 200])
def test_an_overwrite_of_a_step_that_is_being_saved(run, monkeypatch, step):
    """It looked before the first save had reached the persistent directory, which kept its value."""
    gate = seams.Gate()
    with run.start(asynchronous=True) as checkpointer:
        save(checkpointer, 200, 2)
        with monkeypatch.context() as patch:
            seams.at(patch, "commit", before=gate, where=seams.below(run.persistent))
            # beneath a newer one, so that the next save looks, too; or once more
            older = step == 100
            assert checkpointer.save(step, {"n": 3}, force=older, overwrite=not older)
            assert gate.entered.wait(60)
            threading.Timer(0.2, gate.go.set).start()
            save(checkpointer, step, 4, overwrite=True)
        assert checkpointer.load(step)["n"] == 4
    both, alone = run.values()
    assert both[step] == alone[step] == 4


# ---- going back ----------------------------------------------------------------------------------


def test_a_save_that_leaves_steps_and_fails_halfway_leaves_them_for_its_own_program_too(
    run, monkeypatch
):
    """The second write of its file failed: all others no longer saw the steps that it leaves, and it did."""
    with run.begun(100, 101, 200, 202) as checkpointer:
        assert checkpointer.restore(101, state={"n": 0})["state"]["n"] == 101
        with monkeypatch.context() as patch:
            full = {"before": seams.fail(), "where": seams.names(".ckpt-run")}
            seams.at(patch, "note", **full, nth=2)
            with pytest.raises(OSError, match="No space"):
                checkpointer.save(102, {"n": -102})
        assert run.values()[0] == {100: 100, 101: 101}
        assert checkpointer.all_steps() == [100, 101]
        save(checkpointer, 102, -102)
    assert run.values()[0] == {100: 100, 101: 101, 102: -102}


@pytest.mark.parametrize("nth", [1, 2])
def test_a_rollback_that_cannot_be_written_down_changes_nothing_or_is_finished(
    run, monkeypatch, nth
):
    """The disk is full when the run file is written: before. When it is written again: the next writer does that."""
    before = {100: 100, 101: 101, 200: 200, 201: 201}
    with run.begun(*before) as checkpointer:
        with monkeypatch.context() as patch:
            full = {"before": seams.fail(), "where": seams.names(".ckpt-run")}
            seams.at(patch, "note", **full, nth=nth)
            with pytest.raises(OSError, match="No space"):
                checkpointer.rollback_to(101)
        found = run.values()[0]
        assert found == (before if nth == 1 else {100: 100, 101: 101})
        checkpointer.rollback_to(101)
        save(checkpointer, 200, -200)
    assert run.values()[0] == {100: 100, 101: 101, 200: -200}


@pytest.mark.parametrize("call", ["rollback_to", "delete"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_who_was_interrupted_sees_what_a_restart_sees(run, monkeypatch, call, error):
    """The steps leave with one file; local copies that it notes as gone are not listed, nor restored, after that."""
    with run.begun(100, 102, 103) as writer:
        with monkeypatch.context() as patch:
            seams.at(patch, "note", after=seams.fail(error), where=seams.names(".ckpt-run"))
            with pytest.raises(error):
                getattr(writer, call)(102 if call == "rollback_to" else 103)
        assert writer.all_steps() == [100, 102]
        with pytest.raises(ckpt.CheckpointNotFound):
            writer.load(103)
        save(writer, 103, 30)
        assert writer.load(103)["n"] == 30
    assert run.values()[0] == {100: 100, 102: 102, 103: 30}


def test_a_refused_delete_changes_nothing(run: Run) -> None:
    """A save between persistent steps goes on as before, and retires nothing that another program put there."""
    with run.begun(100) as checkpointer:
        with pytest.raises(ckpt.CheckpointNotFound):
            checkpointer.delete(101)
        ckpt.save(run.persistent / "200", {"n": 200}, options=ckpt.Options(durable=False))
        save(checkpointer, 101, 101)
        assert checkpointer.all_steps() == [100, 101, 200]


# ---- being asked to stop -------------------------------------------------------------------------


def test_the_example_of_the_guide_with_two_tiers(run: Run) -> None:
    """A signal between the save and the question whether to stop."""
    policy = ckpt.when.every_steps(2) | ckpt.when.preempted()
    with run.start(save_policy=policy, asynchronous=True) as checkpointer:
        assert not checkpointer.should_stop
        for step in range(100, 110):
            checkpointer.save(step, {"n": step})
            if step == 104:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.should_stop:
                assert checkpointer.save(step, {"n": step}, force=True)
                break
    shutil.rmtree(run.local)
    assert run.persistent_values() == {100: 100, 104: 104}


# ---- interrupted, and failed in one tier -----------------------------------------------------------

EVERY_THIRD = ckpt.Options(persist_policy=ckpt.when.every_steps(3), local_max_to_keep=9)


@contextmanager
def raised_by_a_signal_once(entered: threading.Event) -> Iterator[None]:
    """A handler raises in the main thread, soon after the event is set."""

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        assert entered.wait(30)
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sender.join(30)
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("of", ["numpy", "jax"])
def test_an_interrupted_synchronous_save_has_the_values_of_its_call(tmp_path, monkeypatch, of):
    """Its threads go on, so they must not read the memory to which the caller writes from then on."""
    gate = seams.Gate()
    seams.at(monkeypatch, "write", before=gate)
    values = np.zeros(1 << 18)
    state: Any = values if of == "numpy" else jnp.asarray(values)
    with ckpt.Checkpointer(
        tmp_path / "run", local_directory=tmp_path / "fast", asynchronous=False
    ) as checkpointer:
        with raised_by_a_signal_once(gate.entered):
            checkpointer.save(1, {"w": state})
        values[:] = 7
        if of == "jax":
            state.delete()
        gate.go.set()
    found = [file.parent for file in tmp_path.glob("**/1/ckpt.json")]
    assert len(found) == 2
    for path in found:
        assert (np.asarray(ckpt.load(path)["w"]) == 0).all(), path


def test_a_step_whose_local_save_has_failed_is_continued_from_all_the_same(tmp_path, monkeypatch):
    """Its persistent save ends later and well: the next step continues from it, and does not leave it behind."""
    gate = seams.Gate()
    with ckpt.Checkpointer(
        tmp_path / "run", local_directory=tmp_path / "fast", options=EVERY_THIRD
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": np.zeros(3) + step})
            checkpointer.wait_until_finished()
        with monkeypatch.context() as patch:
            seams.at(patch, "write", before=seams.fail(), where=seams.below(tmp_path / "fast"))
            seams.at(patch, "write", before=gate, where=seams.below(tmp_path / "run"))
            checkpointer.save(3, {"w": np.zeros(3) + 3})
            assert gate.entered.wait(30)
        with pytest.raises(OSError, match="No space left"):
            checkpointer.save(4, {"w": np.zeros(3) + 4})
        saving = threading.Thread(target=checkpointer.save, args=(4, {"w": np.zeros(3) + 4}))
        saving.start()
        saving.join(0.3)  # it waits for what it continues from
        assert saving.is_alive()
        gate.go.set()
        saving.join(30)
        for step in (5, 6):
            checkpointer.save(step, {"w": np.zeros(3) + step})
    saved = sorted(file.parent for file in tmp_path.glob("run/**/ckpt.json"))
    assert saved == [tmp_path / "run/3", tmp_path / "run/6"]
