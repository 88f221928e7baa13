"""Deleting steps: never one that is being read, into the trash on request, failures told."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import keep
from ckpt_core._directory import PosixBackend
from ckpt_core._directory.hidden_names import TEMPORARY
from ckpt_core._load import load_checkpoint, make_request
from ckpt_core._saved.opening import open_checkpoint
from tests.support import seams
from tests.support.children import environment


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(4, float(step)), "b": np.arange(3)}


def whole(tree: Any, step: int) -> bool:
    return np.array_equal(tree["w"], state(step)["w"]) and np.array_equal(tree["b"], np.arange(3))


def steps_of(directory: Path) -> list[int]:
    return ckpt.Checkpointer(directory, read_only=True).all_steps()


def during(work: Callable[[], Any]) -> Callable[..., bool]:
    """An ``only=`` that takes everything and does the work once, in the middle of a load."""
    done: list[int] = []

    def choose(path: Any, leaf: Any) -> bool:
        if not done:
            done.append(1)
            work()
        return True

    return choose


def test_a_step_that_is_being_read_here_stays(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, max_to_keep=1, asynchronous=False) as checkpointer:
        checkpointer.save(1, state(1))

        def save_two() -> None:
            assert checkpointer.save(2, state(2))
            assert checkpointer.all_steps() == [1, 2]

        assert whole(ckpt.load(tmp_path / "1", only=during(save_two)), 1)
        assert checkpointer.all_steps() == [1, 2]
        checkpointer.save(3, state(3))
        assert checkpointer.all_steps() == [3]


def test_delete_refuses_a_step_that_is_being_read(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.save(2, state(2))

        def delete() -> None:
            with pytest.raises(ckpt.CheckpointError, match="being read"):
                checkpointer.delete(1)

        assert whole(ckpt.load(tmp_path / "1", only=during(delete)), 1)
        checkpointer.delete(1)
        assert checkpointer.all_steps() == [2]


def test_a_step_whose_deletion_was_refused_is_still_ours(tmp_path: Path) -> None:
    """A save of it does nothing, as before; it is not taken for a foreign step that must make way."""
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, state(1))

        def delete() -> None:
            with pytest.raises(ckpt.CheckpointError, match="being read"):
                checkpointer.delete(1)
            assert not checkpointer.save(1, state(9))

        assert whole(ckpt.load(tmp_path / "1", only=during(delete)), 1)
        assert not (tmp_path / "retired").exists()
        checkpointer.delete(1)
        assert checkpointer.save(1, state(2))
    assert whole(ckpt.load(tmp_path / "1"), 2)


READER = """
import sys
import ckpt_core as ckpt

waited = []

def choose(path, leaf):
    if not waited:
        waited.append(1)
        print("reading", flush=True)
        sys.stdin.readline()
    return True

print(float(ckpt.load(sys.argv[1], only=choose)["w"][0]), flush=True)
"""


@contextlib.contextmanager
def reader_of(step: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of reading the step; killed at the end."""
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(step)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        yield reader
    finally:
        reader.kill()
        reader.communicate(timeout=60)


def test_a_step_that_another_process_reads_stays(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, max_to_keep=1, asynchronous=False) as checkpointer:
        checkpointer.save(1, state(1))
        with reader_of(tmp_path / "1") as reader:
            checkpointer.save(2, state(2))
            assert checkpointer.all_steps() == [1, 2]
            out, _ = reader.communicate("go on\n", timeout=60)
            assert out == "1.0\n"
        checkpointer.save(3, state(3))
        assert checkpointer.all_steps() == [3]


def test_a_reader_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "1", state(1))
    with reader_of(tmp_path / "1"), pytest.raises(BlockingIOError):
        PosixBackend().delete(str(tmp_path / "1"))
    PosixBackend().delete(str(tmp_path / "1"))
    assert os.listdir(tmp_path) == []


def test_into_the_trash(tmp_path: Path) -> None:
    options = ckpt.Options(trash_directory="todelete")
    for _ in range(2):
        with ckpt.Checkpointer(
            tmp_path, max_to_keep=1, options=options, asynchronous=False
        ) as checkpointer:
            checkpointer.save(1, state(1), overwrite=True)
            checkpointer.save(2, state(2))
            assert checkpointer.all_steps() == [2]
            checkpointer.delete(2)
    trashed = sorted(os.listdir(tmp_path / "todelete"))
    assert [name.split(".")[0] for name in trashed] == ["1", "1", "2", "2"]
    for name in trashed:
        assert whole(ckpt.load(tmp_path / "todelete" / name), int(name[0]))
    assert steps_of(tmp_path) == []


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "12"])
def test_names_of_the_trash_refused(name: str) -> None:
    with pytest.raises(ValueError, match="trash_directory"):
        ckpt.Options(trash_directory=name)


def test_a_store_has_a_trash_too(tmp_path: Path) -> None:
    """Object by object, since nothing can be renamed there."""
    url = f"memory://{tmp_path.name}/run"
    options = ckpt.Options(trash_directory="todelete")
    with ckpt.Checkpointer(url, max_to_keep=1, options=options, asynchronous=False) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.save(2, state(2))
        assert checkpointer.all_steps() == [2]
    assert np.array_equal(ckpt.load(f"{url}/todelete/1")["w"], state(1)["w"])


def test_time_for_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("ckpt_core._run.retention.time.monotonic", lambda: now[0])
    options = ckpt.Options(delete_grace_secs=60)
    with ckpt.Checkpointer(
        tmp_path, max_to_keep=1, options=options, asynchronous=False
    ) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state(step))
            now[0] += 25
        assert checkpointer.all_steps() == [0, 1, 2]
        now[0] += 25  # step 0 has not been needed since second 25, step 1 since second 50
        checkpointer.save(3, state(3))
        assert checkpointer.all_steps() == [1, 2, 3]
        now[0] += 1000
        checkpointer.save(4, state(4))
        assert checkpointer.all_steps() == [3, 4]


def test_a_failed_deletion_is_reported_and_not_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    told: list[ckpt.Event] = []
    options = ckpt.Options(on_event=told.append)
    with ckpt.Checkpointer(
        tmp_path, max_to_keep=1, options=options, asynchronous=False
    ) as checkpointer:
        checkpointer.save(1, state(1))
        with monkeypatch.context() as patch:
            fails = seams.fail(OSError, 5, "broken")
            seams.at(patch, (PosixBackend, "delete"), before=fails)
            assert checkpointer.save(2, state(2))
        assert checkpointer.all_steps() == [1, 2]
        failed = [event for event in told if event.kind == "delete_failed"]
        assert [(event.step, str(event.error)) for event in failed] == [(1, "[Errno 5] broken")]
        assert "could not delete" in caplog.text
        checkpointer.save(3, state(3))  # tried again
        assert checkpointer.all_steps() == [3]


def test_a_step_deleted_between_the_look_and_the_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
    follower = ckpt.Checkpointer(tmp_path, read_only=True)

    def delete(_: Any, path: str, head: bytes) -> None:
        if path.endswith("/3"):
            shutil.rmtree(path)

    seams.at(monkeypatch, (PosixBackend, "reading"), before=delete)
    restored = follower.restore_latest(state=state(0))
    assert restored is not None
    assert restored.step == 2


@pytest.mark.parametrize("moment", ["open", "flock"])
def test_a_step_that_is_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Before the record's file is opened to be locked, and between that and the lock."""
    ckpt.save(tmp_path / "one", state(1))
    opened = open_checkpoint(tmp_path / "one")
    module = os if moment == "open" else fcntl
    real = getattr(module, moment)

    def replace_first(*arguments: Any) -> Any:
        patch.undo()  # once
        ckpt.save(tmp_path / "one", state(2), overwrite=True)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, moment, replace_first)
        with pytest.raises(ckpt.CheckpointNotFound, match="deleted or replaced"):
            load_checkpoint(lambda: opened, None, None, make_request())
    assert whole(ckpt.load(tmp_path / "one"), 2)


def test_a_function_says_what_to_keep(tmp_path: Path) -> None:
    def odd(facts: Sequence[keep.StepFacts]) -> list[int]:
        return [entry.step for entry in facts if entry.step % 2]

    with ckpt.Checkpointer(tmp_path, keep_policy=odd, asynchronous=False) as checkpointer:
        for step in range(7):
            checkpointer.save(step, state(step))
        assert checkpointer.all_steps() == [1, 3, 5, 6]
        assert checkpointer.explain() == {
            **{step: "kept: chosen by odd" for step in (1, 3, 5)},
            6: "kept: the newest step",
        }
    joined = keep.latest(1) | odd
    other = keep.by(odd) | keep.latest(1)
    facts = [keep.StepFacts(step) for step in range(5)]
    assert set(joined(facts)) == set(other(facts)) == {1, 3, 4}
    assert set((odd | keep.latest(2))(facts)) == {1, 3, 4}
    assert keep.by(lambda facts: {0: "my reason"})(facts) == {0: "my reason"}


@pytest.mark.parametrize("policy", ["latest", 3])
def test_no_policy(tmp_path: Path, policy: Any) -> None:
    with pytest.raises(TypeError, match="keep_policy"):
        ckpt.Checkpointer(tmp_path, keep_policy=policy)


def test_a_function_that_gives_nonsense_costs_no_step(tmp_path: Path) -> None:
    with ckpt.Checkpointer(
        tmp_path,
        keep_policy=lambda facts: 5,
        asynchronous=False,  # type: ignore
    ) as checkpointer:
        checkpointer.save(1, state(1))
        with pytest.raises(TypeError, match="must give step numbers"):
            checkpointer.save(2, state(2))
    assert steps_of(tmp_path) == [1, 2]


def test_an_evaluator_that_follows(tmp_path: Path, caplog: Any) -> None:
    """A reader and a writer with the tightest retention, in turn: what was listed can be read."""
    caplog.set_level(logging.INFO, "ckpt_core")
    with ckpt.Checkpointer(tmp_path, max_to_keep=1, asynchronous=False) as trainer:
        evaluator = ckpt.Checkpointer(tmp_path, read_only=True)
        seen: int | None = None
        for step in range(5):
            trainer.save(step, state(step))
            seen = evaluator.wait_for_new_step(seen, timeout_secs=5)
            assert seen == step
            later = step + 100

            def save_later(later: int = later) -> None:
                ckpt.save(tmp_path / str(later), state(later))

            tree = evaluator.load(seen, only=during(save_later))
            assert whole(tree, step)
            shutil.rmtree(tmp_path / str(later))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_goes_on_past_a_damaged_step(tmp_path: Path, asynchronous: bool) -> None:
    """A job that resumes from an older step must be able to save the next ones without help."""
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, state(step))
    (tmp_path / "30" / "ckpt.json").write_bytes(b"damaged")
    (tmp_path / "20" / "state" / "manifest.ocdbt").write_bytes(b"damaged")
    with ckpt.Checkpointer(tmp_path, max_to_keep=2, asynchronous=asynchronous) as checkpointer:
        with pytest.warns(RuntimeWarning, match="damaged and skipped"):
            restored = checkpointer.restore_latest(state=state(0))
        assert restored is not None
        assert whole(restored["state"], restored.step or 0)
        for step in (15, 20, 25, 30):
            assert checkpointer.save(step, state(step + 1))
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [25, 30]
        assert whole(checkpointer.load(30), 31)
    assert sorted(os.listdir(tmp_path / "damaged")) == ["20", "30"]
    assert (tmp_path / "damaged" / "30" / "ckpt.json").read_bytes() == b"damaged"
    assert steps_of(tmp_path) == [25, 30]


def test_a_step_that_was_not_found_damaged_still_hides(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(30, state(30))
    (tmp_path / "30" / "ckpt.json").write_bytes(b"damaged")
    with (
        ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer,
        pytest.raises(ckpt.CheckpointExists, match="rollback_to"),
    ):
        checkpointer.save(15, state(15))


def test_what_thousands_of_steps_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, not times: a save reads one record and looks into no step that is older."""
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(0, state(0))
    for step in range(1, 300):
        shutil.copytree(tmp_path / "0", tmp_path / str(step))
    looked: list[str] = []
    records: list[str] = []

    def read(_: Any, path: str, name: str, *_limit: int) -> None:
        if name == "ckpt.json":
            records.append(path)

    look = (PosixBackend, "is_checkpoint")
    seams.at(monkeypatch, look, before=lambda _, path: looked.append(path))
    seams.at(monkeypatch, (PosixBackend, "read"), before=read)
    with ckpt.Checkpointer(
        tmp_path, keep_policy=keep.every_steps(1), asynchronous=False
    ) as checkpointer:
        assert looked == records == []
        assert checkpointer.latest_step() == 299
        assert len(looked) == 1
        assert checkpointer.save(300, state(300))
        assert len(records) == 301  # each once: the policy has to know them
        looked.clear()
        records.clear()
        assert checkpointer.save(301, state(301))
        assert [os.path.basename(path) for path in records] == ["301"]
        assert len(looked) <= 2 * 302  # two listings by retention, in the background


def spoil_record(directory: Path, step: int) -> None:
    (directory / str(step) / "ckpt.json").write_text("{}")


@pytest.mark.filterwarnings("ignore:.*damaged and skipped:RuntimeWarning")
def test_a_damaged_newer_step_takes_no_place_of_a_good_one(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(50, state(50))
        checkpointer.save(100, state(100))
    (tmp_path / "100" / "state" / "manifest.ocdbt").write_bytes(b"damaged")  # not the record
    with ckpt.Checkpointer(tmp_path, max_to_keep=1, asynchronous=False) as checkpointer:
        restored = checkpointer.restore_latest(state=state(0))
        assert restored
        assert restored.step == 50
        assert "damaged" in checkpointer.explain()[100]
        checkpointer.save(60, restored["state"])
        assert checkpointer.all_steps() == [60]  # it may be whole again some day: it is set aside
        assert (tmp_path / "damaged" / "100" / "ckpt.json").exists()
        checkpointer.save(70, state(70))
        assert checkpointer.all_steps() == [70]
        restored = checkpointer.restore_latest(state=state(0))
        assert restored
        assert restored.step == 70


def test_damaged_steps_can_be_deleted_and_rolled_back(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        for step in range(4):
            checkpointer.save(step, state(step))
        spoil_record(tmp_path, 2)
        spoil_record(tmp_path, 3)
        checkpointer.delete(3)
        assert checkpointer.all_steps() == [0, 1, 2]
        with pytest.raises(ckpt.CheckpointNotFound, match="has no step 3; it has: 0, 1, 2"):
            checkpointer.delete(3)
        assert checkpointer.rollback_to(0) == [1, 2]
        assert checkpointer.all_steps() == [0]


def test_a_rollback_before_every_step_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckpt.Checkpointer(tmp_path, max_to_keep=2) as checkpointer:
        for step in (100, 110, 120):
            checkpointer.save(step, state(step))
        assert checkpointer.rollback_to(115) == [120]
        assert not caplog.text
        assert checkpointer.rollback_to(60) == [110]
        assert "rollback_to(60) has deleted every step" in caplog.text
        caplog.clear()
        assert checkpointer.rollback_to(60) == [] and not caplog.text


def test_rollback_deletes_a_step_under_all_its_names(tmp_path: Path) -> None:
    for step in (5, 6):
        ckpt.save(tmp_path / str(step), state(step))
    ckpt.save(tmp_path / "step_6", state(6))
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.rollback_to(5) == [6]
        assert checkpointer.all_steps() == [5]


def test_locks_as_nfs_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a shared lock takes a file open for reading, an exclusive one a file open for writing."""
    flock = fcntl.flock

    def nfs(descriptor: int, kind: int) -> None:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == (os.O_RDONLY if kind & fcntl.LOCK_EX else os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", nfs)
    with ckpt.Checkpointer(tmp_path, max_to_keep=1, asynchronous=False) as checkpointer:
        checkpointer.save(1, state(1))
        ckpt.load(tmp_path / "1", only=during(lambda: checkpointer.save(2, state(2))))
        assert checkpointer.all_steps() == [1, 2]
        checkpointer.save(3, state(3))
        assert checkpointer.all_steps() == [3]


def test_a_writer_elsewhere_that_still_writes_is_left_alone(tmp_path: Path) -> None:
    hour_ago = time.time() - 2 * 3600
    for name in ("alive", "dead"):
        temporary = tmp_path / f"{TEMPORARY}{name}.00000000-1-1.abcd"
        deepest = temporary / "state" / "d"
        deepest.mkdir(parents=True)
        (deepest / "data").write_bytes(b"data")
        for path in (deepest / "data", deepest, deepest.parent, temporary):
            if name == "dead" or path.name != "data":
                os.utime(path, (hour_ago, hour_ago))
    ckpt.Checkpointer(tmp_path)
    (left,) = os.listdir(tmp_path)
    assert "alive" in left


def test_a_step_that_is_being_verified_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckpt.Checkpointer(tmp_path, max_to_keep=1, asynchronous=False) as checkpointer:
        checkpointer.save(1, state(1))

        def save(*_: Any) -> None:
            checkpointer.save(2, state(2))

        seams.at(monkeypatch, (PosixBackend, "files"), after=save)
        report = ckpt.verify(tmp_path / "1")
        assert report.ok, report.problems
        assert checkpointer.all_steps() == [1, 2]


# ---- what no Checkpointer has saved --------------------------------------------------------------


@pytest.mark.parametrize("prefix", [None, "run"])
def test_single_checkpoints_beside_a_run_are_not_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str | None
) -> None:
    """Their names end in numbers, so they count as steps; a sweep was deleted by the first save of a run beside it."""
    for name in ("lr_1", "wd_1", "lr_2"):
        ckpt.save(tmp_path / name, {"other": np.ones(5)})
    with ckpt.Checkpointer(tmp_path, max_to_keep=1, step_prefix=prefix) as checkpointer:
        for step in (10, 11, 12):
            checkpointer.save(step, state(step))
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [1, 2, 12]
        assert "a Checkpointer has saved lr_2" in checkpointer.explain()[2]
    last = "12" if prefix is None else "run_12"
    assert {path.name for path in tmp_path.iterdir() if path.name[0] != "."} == {
        "lr_1", "lr_2", "wd_1", last
    }  # fmt: skip
    assert caplog.text.count("give each run a directory of its own") == 1
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.delete(2)
    assert not (tmp_path / "lr_2").exists()


def test_copies_beside_steps_keep_none_of_them(tmp_path: Path) -> None:
    """``best_2`` stays, and the step 2 of the run goes."""
    with ckpt.Checkpointer(tmp_path, max_to_keep=2, asynchronous=False) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, state(step))
            if step == 2:
                ckpt.save(tmp_path / "best_2", state(2))
    assert {path.name for path in tmp_path.iterdir() if path.name[0] != "."} == {"5", "6", "best_2"}


def test_steps_of_another_prefix_that_a_run_has_saved_are_deleted(tmp_path: Path) -> None:
    for number, prefix in ((1, "old"), (2, None), (3, "new")):
        with ckpt.Checkpointer(tmp_path, max_to_keep=1, step_prefix=prefix) as checkpointer:
            if number > 1:
                checkpointer.restore_latest(state(0))["state"]  # pyright: ignore
            checkpointer.save(number, state(number))
    assert steps_of(tmp_path) == [3]


def test_a_step_with_a_misspelt_metric_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {"best_metric": "loss", "best_mode": "min", "max_to_keep": 1}
    with ckpt.Checkpointer(tmp_path, **kept, asynchronous=False) as checkpointer:
        for step, name in enumerate(("loss", "loss", "los", "loss")):
            checkpointer.save(step, state(step), metrics={name: 9.0 - step})
        assert checkpointer.all_steps() == [2, 3]
    assert caplog.text.count("step 2 has the metrics 'los', and not 'loss'") == 1
