"""What a ``Checkpointer`` refuses, and what its messages say to do: done, and the program started again."""

from __future__ import annotations

import errno
import logging
import os
import shlex
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import when
from ckpt_core._directory import PosixBackend
from ckpt_core._directory.locks import reading
from tests.contract.advice.said import logged, told
from tests.contract.faults.crafted.signed import read_record, write_record
from tests.support.command_line import Call, make_call  # noqa: F401
from tests.support.damage import failing_reads

FAST = ckpt.Options(durable=False)


def state(step: int, run: int = 0) -> dict[str, Any]:
    return {"w": np.arange(4.0) + step + 100 * run}


def runs(directory: Path, **more: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(directory, **{"options": FAST, **more})


def saved(directory: Path, steps: Any, run: int = 0, **more: Any) -> None:
    """A program that saved these steps, and ended."""
    with runs(directory, **more) as one:
        for step in steps:
            one.save(step, state(step, run))


def resumes(directory: Path, step: int, run: int = 0) -> bool:
    """A new program goes on from this step of this run, and can save the next one."""
    with runs(directory) as again:
        restored = again.restore_latest(state(0))
        assert restored is not None
        right = restored.step == step and np.array_equal(
            restored["state"]["w"], state(step, run)["w"]
        )
        return right and again.save(step + 1, state(step + 1, run))


def run_call(text: str, run: Any) -> Any:
    """A call of a method, as a message spells it."""
    return eval(f"run.{text}", {"run": run})


# A directory in which steps are already

TAKEN = "_run/history.py: before the first save, to go on from step"


@pytest.mark.parametrize("action", ["go on", "begin anew"])
def test_a_step_that_is_there(tmp_path: Path, action: str):
    saved(tmp_path, [0, 1, 2])
    with runs(tmp_path) as run, told(TAKEN) as said:
        run.save(1, state(1, run=1))
    assert resumes_unchanged(tmp_path, [0, 1, 2])
    if action == "go on":
        assert said.between("go on from step ", ".") == "2"
        with runs(tmp_path) as run:
            call = said.between("call ", " before").replace("()", "(like)")
            restored = eval(f"run.{call}", {"run": run, "like": state(0)})
            assert restored.step == 2
        assert resumes(tmp_path, 2)
    else:
        with runs(tmp_path) as run:
            run.save(1, state(1, run=1), **eval(f"dict({said.between('pass ', ' to replace')})"))
        assert "retire 2" in said.text
        assert resumes(tmp_path, 1, run=1)


def resumes_unchanged(directory: Path, steps: list[int]) -> bool:
    with runs(directory, read_only=True) as run:
        return run.all_steps() == steps and all(
            np.array_equal(run.restore(step, state(0))["state"]["w"], state(step)["w"])
            for step in steps
        )


def test_a_directory_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved(tmp_path, [0, 1])
    with monkeypatch.context() as refused:

        def no_permission(*_: Any) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        refused.setattr(PosixBackend, "claim", no_permission)
        key = (
            "_run/lease.py: could not be claimed for this run, which changes nothing there without"
        )
        with told(key, of=PermissionError) as said, runs(tmp_path) as run:
            run.save(2, state(2))
        assert "pass read_only=True to a Checkpointer that only restores" in said.text
        assert resumes_unchanged(tmp_path, [0, 1])
    saved(tmp_path, [2])
    assert resumes(tmp_path, 2)


def test_a_step_that_is_there_after_a_restore(tmp_path: Path):
    saved(tmp_path, [0, 1, 2])
    with runs(tmp_path) as run:
        start = run.restore_latest(state(0))
        assert start is not None and start["state"]
        with told(
            "_run/history.py: is there already, and not from this Checkpointer: pass "
        ) as said:
            run.save(1, state(1, run=1))
        assert "restore_latest()" not in said.text, "it was called"
        run.save(1, state(1, run=1), **eval(f"dict({said.between('pass ', ' to replace')})"))
    with runs(tmp_path) as run:
        assert np.array_equal(run.restore(1, state(0))["state"]["w"], state(1, run=1)["w"])


OLDER = "_run/history.py: call restore_latest() before the first save, to go on from step"


@pytest.mark.parametrize("action", ["go on", "retire", "another directory", "beside"])
def test_an_older_step_than_those_there(tmp_path: Path, action: str):
    directory = tmp_path / "run"
    saved(directory, [0, 5, 10])
    with runs(directory) as run, told(OLDER.replace("call restore_latest() ", "")) as said:
        run.save(3, state(3, run=1))
    if action == "go on":
        assert said.between("go on from step ", ",") == "10"
        assert resumes(directory, 10)
    elif action == "retire":
        with runs(directory) as run:
            run_call(said.between(", or ", " to delete"), run)
            run.save(3, state(3, run=1))
        assert resumes(directory, 3, run=1)
    elif action == "another directory":
        saved(tmp_path / "other", [3], run=1)
        assert resumes(tmp_path / "other", 3, run=1) and resumes(directory, 10)
    else:
        with runs(directory) as run:
            run.save(3, state(3, run=1), **eval(f"dict({said.between('directory; ', ' saves')})"))
        assert resumes(directory, 10)
        with runs(directory) as run:
            found = run.restore(3, state(0))["state"]["w"]
        assert np.array_equal(found, state(3, run=1)["w"]), "beside those"


@pytest.mark.parametrize("action", ["rollback_to", "another directory", "force=True"])
def test_an_older_step_after_a_restore(tmp_path: Path, action: str):
    directory = tmp_path / "run"
    saved(directory, [0, 5, 10])
    with runs(directory) as run:
        start = run.restore_latest(state(0))
        assert start is not None and start["state"]
        with told(
            "_run/history.py: restore_latest would resume from those. Call rollback_to("
        ) as said:
            run.save(3, state(3, run=1))
            run.wait_until_finished()
        if action == "rollback_to":
            run_call(said.between("Call ", " to delete"), run)
            run.save(3, state(3, run=1))
        elif action == "force=True":
            run.save(3, state(3, run=1), **eval(f"dict({said.between('or pass ', ' to save it')})"))
    if action == "another directory":
        saved(tmp_path / "other", [3], run=1)
        assert resumes(tmp_path / "other", 3, run=1)
    assert resumes(directory, *((3, 1) if action == "rollback_to" else (10, 0)))


def test_a_restored_value_that_was_not_taken(tmp_path: Path):
    def start(taken: str | None) -> None:
        with runs(tmp_path) as run:
            params = state(0)
            restored = run.restore_latest(params=params)
            assert restored is not None
            if taken is not None:
                names = {"restored": restored, "params": params}
                exec(taken, names)
                params = names["params"]
            run.save(2, params={"w": params["w"] + 1})

    with runs(tmp_path) as run:
        run.save(1, params=state(1))
    with told("_run/unread.py: Take the value right after the restore: ") as said:
        start(None)
    start(said.text.rpartition("after the restore: ")[2])
    with runs(tmp_path) as run:
        assert np.array_equal(run.restore(2, params=state(0))["params"]["w"], state(2)["w"])


@pytest.mark.parametrize("action", ["pass it", "begin anew"])
def test_an_item_that_was_left_out(tmp_path: Path, action: str):
    with runs(tmp_path) as run:
        run.save(1, params=state(1), opt=state(1))
    with runs(tmp_path) as run:
        restored = run.restore_latest(params=state(0), missing="keep")
        assert restored is not None
        with told(
            "_run/unread.py: that was not restored, and now one of that name is being"
        ) as said:
            run.save(2, params=restored["params"], opt=state(0))
    with runs(tmp_path) as run:
        if action == "pass it":
            assert said.between("Pass ", " to the restore") == "opt="
            restored = run.restore_latest(params=state(0), opt=state(0))
            assert restored is not None
            run.save(2, params=restored["params"], opt=restored["opt"])
        else:
            how = eval(f"dict({said.text.rpartition('there: ')[2]})")
            restored = run.restore_latest(params=state(0), **how)
            assert restored is not None
            run.save(2, params=restored["params"], opt=state(0))
    with runs(tmp_path) as run:
        found = run.restore(2, params=state(0), opt=state(0))
        assert np.array_equal(found["params"]["w"], state(1)["w"])
        wanted = state(1 if action == "pass it" else 0)["w"]
        assert np.array_equal(found["opt"]["w"], wanted)


# Directories


def test_a_checkpoint_is_no_directory_of_steps(tmp_path: Path):
    saved(tmp_path, [3])
    key = "_run/steps.py: if this is one of its steps, or load it with ckpt.load or ckpt.restore"
    with told(key.replace(", or load it with ckpt.load or ckpt.restore", "")) as said:
        runs(tmp_path / "3")
    assert resumes(Path(said.between("make the Checkpointer on ", " if")), 3)
    assert np.array_equal(ckpt.load(tmp_path / "3")["w"], state(3)["w"])
    assert np.array_equal(ckpt.restore(tmp_path / "3", state(0))["state"]["w"], state(3)["w"])


def test_a_directory_of_steps_is_no_checkpoint(tmp_path: Path):
    saved(tmp_path, [3, 4])
    with told("_saved/opening.py: not one: load one of them by its path, such as") as said:
        ckpt.load(tmp_path)
    assert np.array_equal(ckpt.load(said.between("such as ", ", or use"))["w"], state(4)["w"])
    with eval(said.after("or use "), {"ckpt_core": ckpt, "directory": tmp_path}) as run:
        assert run.restore_latest(state(0)).step == 4


@pytest.mark.parametrize("action", ["stop this run", "a directory of its own"])
def test_two_runs_in_one_directory(tmp_path: Path, action: str):
    directory = tmp_path / "run"
    first = runs(directory, asynchronous=False)
    first.save(0, state(0))
    second = runs(directory, asynchronous=False)
    second.restore_latest(state(0))["state"]  # pyright: ignore[reportOptionalSubscript]
    second.save(1, state(1))
    with told("_run/lease.py: Stop this run, or give each run its own directory"):
        first.save(1, state(1, run=1))
    first.close()
    if action == "a directory of its own":
        saved(tmp_path / "other", [1], run=1)
        assert resumes(tmp_path / "other", 1, run=1)
    second.save(2, state(2))
    second.close()
    assert resumes(directory, 2)


def test_a_directory_that_is_emptied_beneath_a_run(tmp_path: Path):
    run = runs(tmp_path / "run", asynchronous=False)
    run.save(0, state(0))
    shutil.rmtree(tmp_path / "run")
    with told("_run/lease.py: Stop this run, and start it again if nobody else trains here"):
        run.save(1, state(1))
    run.close()
    saved(tmp_path / "run", [1])
    assert resumes(tmp_path / "run", 1)


def test_waiting_for_a_step_after_what_is_no_step(tmp_path: Path):
    saved(tmp_path, [0, 1])
    with runs(tmp_path, read_only=True) as reader:
        first = reader.wait_for_new_step(timeout_secs=0)
        with told("_run/steps.py: pass what the last call gave"):
            reader.wait_for_new_step(after=str(first), timeout_secs=0)  # pyright: ignore[reportArgumentType]
        assert reader.wait_for_new_step(after=first, timeout_secs=0) is None


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"{", b"run-x\n"])
def test_a_note_of_the_run_that_is_damaged(tmp_path: Path, content: bytes):
    """Local steps would count no more, and a restart go back, without a word."""
    persists = ckpt.when.every_steps(2)
    more: dict[str, Any] = {
        "local_directory": tmp_path / "local",
        "options": ckpt.Options(persist_policy=persists, durable=False),
        "asynchronous": False,
    }
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        for step in range(4):
            run.save(step, state(step))
    (tmp_path / "run" / ".ckpt-run").write_bytes(content)
    with told("_run/lineage.py: Delete the file to go on from the steps") as said:
        ckpt.Checkpointer(tmp_path / "run", **more)
    Path(said.text.partition(" is damaged")[0]).unlink()
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        restored = run.restore_latest(state(0))
        assert restored is not None and restored.step == 2
        assert run.save(3, restored.state)


def test_a_local_step_that_cannot_be_read(tmp_path: Path):
    more: dict[str, Any] = {"local_directory": tmp_path / "local", "asynchronous": False}
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        for step in range(3):
            run.save(step, state(step))
    shutil.rmtree(tmp_path / "run" / "2")
    (record,) = (tmp_path / "local").rglob("2/ckpt.json")
    content = read_record(record.parent)
    write_record(record.parent, content | {"format_version": 2})
    with (
        told("_run/tiers/local.py: to go back to an older one, restore it by its number") as said,
        ckpt.Checkpointer(tmp_path / "run", **more) as run,
    ):
        run.restore_latest(state(0))
    assert str(record.parent) in said.text
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        assert run.save(2, run.restore(1, state(0)).state)
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        restored = run.restore_latest(state(0))
        assert restored is not None and restored.step == 2


def test_a_local_step_that_the_disk_does_not_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    more: dict[str, Any] = {"local_directory": tmp_path / "local", "asynchronous": False}
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        for step in range(3):
            run.save(step, state(step))
    shutil.rmtree(tmp_path / "run" / "2")
    failing = failing_reads(monkeypatch, tmp_path / "local", "pread")
    with (
        told("_run/tiers/verdict.py: Start again when it can be read; to go back") as said,
        ckpt.Checkpointer(tmp_path / "run", **more) as run,
    ):
        run.restore_latest(state(0))
    assert failing and "restore(step, ...)" in said.text
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        assert run.restore(1, state(0)).step == 1
    monkeypatch.undo()
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        restored = run.restore_latest(state(0))
        assert restored is not None and restored.step == 2


def test_local_steps_of_a_run_whose_note_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: Call
):
    more: dict[str, Any] = {
        "local_directory": tmp_path / "local",
        "options": ckpt.Options(persist_policy=ckpt.when.every_steps(2), durable=False),
    }
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        for step in range(4):
            run.save(step, state(step))
    note = tmp_path / "run" / ".ckpt-run"
    note.rename(tmp_path / "kept")
    ckpt.Checkpointer(tmp_path / "run", **more).close()
    said = logged("_run/tiers/ended.py: put that file back before the first save", caplog)
    assert f"the {note.name} there" in said.text
    remove = shlex.split(said.after("remove them: "))
    (tmp_path / "kept").replace(note)
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        restored = run.restore_latest(state(0))
        assert restored is not None and restored.step == 3
    note.unlink()
    ckpt.Checkpointer(tmp_path / "run", **more).close()
    assert remove.pop(0) == "ckpt" and call(*remove, "--yes")[0] == 0
    assert not list((tmp_path / "local").glob(remove[-1]))
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        assert run.all_steps() == [0, 2]


def test_a_note_of_removals_that_is_damaged(tmp_path: Path):
    from ckpt_core._run.lineage import LEAVING_FILE

    saved(tmp_path, [0, 1])
    (tmp_path / LEAVING_FILE).write_text("{")
    with (
        told("_run/lineage.py: Look at the steps, and delete the file") as said,
        runs(tmp_path) as run,
    ):
        run.restore_latest(state(0))
    file = Path(said.text.partition(" is damaged")[0])
    assert file.is_absolute(), f"where is {file}?"
    file.unlink()
    assert resumes(tmp_path, 1)


def test_a_step_that_is_being_read(tmp_path: Path):
    saved(tmp_path, [0, 1])
    with runs(tmp_path) as run:
        with (
            reading(str(tmp_path / "1" / "ckpt.json"), b""),
            told("_run/retention.py: is being read, by this process or another: try again"),
        ):
            run.delete(1)
        run.delete(1)
        assert run.all_steps() == [0]
    assert resumes(tmp_path, 0)


@pytest.mark.parametrize("where", ["run", "run/", "link"])
def test_a_local_directory_that_is_the_other(tmp_path: Path, where: str):
    run, local = tmp_path / "run", f"{tmp_path}/{where}"
    (tmp_path / "link").symlink_to(run)
    with told(
        "_run/tiers/folders.py: for one directory leave local_directory= out; else pass"
    ) as said:
        runs(run, local_directory=local)
    saved(run, [0, 1])
    written = said.after("such as ").replace("/dev/shm/ckpt", str(tmp_path / "apart"))
    saved(run, [2], **eval(f"dict({written})"))
    for other in ("run-local", "run/local", "."):  # odd places, but nothing is mixed up there
        with runs(run, local_directory=tmp_path / other):
            pass
    assert resumes(run, 2)


# Names of items


@pytest.mark.parametrize("restores", [False, True])
def test_an_item_that_is_misspelt(tmp_path: Path, caplog: pytest.LogCaptureFixture, restores: bool):
    with runs(tmp_path) as run:
        run.save(0, model=state(0), layer_1=state(0))
        if not restores:
            run.save(1, modle=state(1), layer_2=state(0))
    if restores:
        with runs(tmp_path) as run:
            assert run.restore_latest(model=state(1), layer_1=state(1))["model"]["w"].size  # pyright: ignore
            run.save(1, modle=state(1), layer_2=state(0))
            run.save(2, modle=state(1), layer_2=state(0))
    key = "_run/unread.py: If it is the same one, write save(..., %s=...)"
    said = logged(key, caplog)
    assert said.text.count("'modle'") == 1 and "layer" not in said.text
    call = said.after("write ").replace("...,", "5,").replace("=...", "=state(5)")
    caplog.clear()
    with runs(tmp_path) as run:
        earlier = run.restore(0, model=state(0), layer_1=state(0))
        assert len([earlier["model"], earlier["layer_1"]]) == 2
        eval(f"run.{call}", {"run": run, "state": state})
        run.save(6, model=state(6), models=state(6))  # beside it: another one
        assert "is saved, which no step has" not in caplog.text
    with runs(tmp_path) as run:
        assert np.array_equal(
            run.restore_latest(model=state(0), models=state(0))["model"]["w"], state(6)["w"]
        )  # pyright: ignore


# Options


def test_a_save_that_is_running(tmp_path: Path):
    go_on = threading.Event()

    def listen(event: Any) -> None:
        if event.kind == "committed":
            go_on.wait(30)

    options = ckpt.Options(durable=False, on_pending="fail", on_event=listen)
    with runs(tmp_path, options=options) as run:
        run.save(0, state(0))
        with told(
            "_run/in_flight.py: is still running, and Options(on_pending='fail') does not wait"
        ):
            run.save(1, state(1))
        go_on.set()
        run.wait_until_finished()
        run.save(1, state(1))
    assert resumes(tmp_path, 1)


def test_a_call_from_a_policy(tmp_path: Path):
    due: list[int] = []

    def careless(step: int, _context: when.Context) -> bool:
        return run.save(step, state(7))

    def careful(step: int, _context: when.Context) -> bool:
        due.append(step)
        return True

    run = runs(tmp_path, save_policy=careless)
    with (
        run,
        told(
            "_run/in_flight.py: Set a flag there instead, and make the call after that one"
        ) as said,
    ):
        run.save(0, state(0))
    assert "save() was called from within save()" in said.text
    with runs(tmp_path, save_policy=careful) as run:
        run.save(0, state(0))
        run.save(due[-1] + 1, state(due[-1] + 1))
    assert resumes(tmp_path, 1)


def test_a_checkpointer_outside_of_the_main_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    made: list[ckpt.Checkpointer] = []

    def work() -> None:
        with runs(tmp_path / "a") as run:
            assert not run.should_stop
        assert not made[0].should_stop

    with caplog.at_level(logging.WARNING), runs(tmp_path / "b") as outside:
        made.append(outside)
        assert not outside.should_stop
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    logged("_run/preemption.py: Python lets only the main thread listen, and this is", caplog)
    logged("_run/preemption.py: Make the Checkpointer, or ask should_stop once, there", caplog)
    told_here = [
        record for record in caplog.records if "will not be noticed" in record.getMessage()
    ]
    assert len(told_here) == 1, "the one that was asked in the main thread says nothing"
