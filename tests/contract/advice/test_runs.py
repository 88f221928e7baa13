"""What a ``Checkpointer`` and its policies refuse, and what their messages say to do: done, and the program started again."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import keep, when
from tests.contract.advice.said import FAST, logged, told


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

TAKEN = "before the first save, to go on from step"


@pytest.mark.parametrize("action", ["go on", "begin anew"])
def test_a_step_that_is_there(tmp_path, action):
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


OLDER = "call restore_latest() before the first save, to go on from step"


@pytest.mark.parametrize("action", ["go on", "retire", "another directory", "beside"])
def test_an_older_step_than_those_there(tmp_path, caplog, action):
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
            assert "has deleted every step" not in caplog.text
            run.save(3, state(3, run=1))
        assert resumes(directory, 3, run=1)
    elif action == "another directory":
        saved(tmp_path / "other", [3], run=1)
        assert resumes(tmp_path / "other", 3, run=1) and resumes(directory, 10)
    else:
        with runs(directory) as run:
            run.save(3, state(3, run=1), **eval(f"dict({said.between('directory; ', ' saves')})"))
        assert "step 3 is saved with force=True, and is older than 5, 10" in caplog.text
        assert resumes(directory, 10)
        with runs(directory) as run:
            found = run.restore(3, state(0))["state"]["w"]
        assert np.array_equal(found, state(3, run=1)["w"]), "beside those"


@pytest.mark.parametrize("action", ["rollback_to", "another directory", "force=True"])
def test_an_older_step_after_a_restore(tmp_path, action):
    directory = tmp_path / "run"
    saved(directory, [0, 5, 10])
    with runs(directory) as run:
        start = run.restore_latest(state(0))
        assert start is not None and start["state"]
        with told("restore_latest would resume from those. Call rollback_to(") as said:
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


@pytest.mark.parametrize("action", ["pass it", "begin anew"])
def test_an_item_that_was_left_out(tmp_path, action):
    with runs(tmp_path) as run:
        run.save(1, params=state(1), opt=state(1))
    with runs(tmp_path) as run:
        restored = run.restore_latest(params=state(0), missing="keep")
        assert restored is not None
        with told("that was not restored, and now one of that name is being") as said:
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


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"{", b"run-x\n"])
def test_a_note_of_the_run_that_is_damaged(tmp_path, content):
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
    with told("Delete the file to go on from the steps") as said:
        ckpt.Checkpointer(tmp_path / "run", **more)
    Path(said.text.partition(" is damaged")[0]).unlink()
    with ckpt.Checkpointer(tmp_path / "run", **more) as run:
        restored = run.restore_latest(state(0))
        assert restored is not None and restored.step == 2
        assert run.save(3, restored.state)


@pytest.mark.parametrize("where", ["run", "run/", "link"])
def test_a_local_directory_that_is_the_other(tmp_path, where):
    run, local = tmp_path / "run", f"{tmp_path}/{where}"
    (tmp_path / "link").symlink_to(run)
    with told("for one directory leave local_directory= out; else pass") as said:
        runs(run, local_directory=local)
    saved(run, [0, 1])
    written = said.after("such as ").replace("/dev/shm/ckpt", str(tmp_path / "apart"))
    saved(run, [2], **eval(f"dict({written})"))
    for other in ("run-local", "run/local", "."):  # odd places, but nothing is mixed up there
        with runs(run, local_directory=tmp_path / other):
            pass
    assert resumes(run, 2)


LOOKS = {
    "restore_latest": lambda run: run.restore_latest(state(0))["state"],
    "restore": lambda run: run.restore(3, state(0))["state"],
    "load": lambda run: run.load(3),
    "latest_step": lambda run: run.latest_step(),
    "all_steps": lambda run: run.all_steps(),
    "rollback_to": lambda run: run.rollback_to(3),
}


@pytest.mark.parametrize("tier", [False, True])
def test_a_run_onto_which_fresh_weights_are_saved(tmp_path, caplog, tier):
    key = "%s: step 4 is saved after step 3, of which this Checkpointer has restored nothing: "
    more = {"local_directory": tmp_path / "local"} if tier else {}
    saved(tmp_path / "run", range(4), **more)
    for action in ("nothing", "another directory", "overwrite", "force", *LOOKS):
        caplog.clear()
        with runs(tmp_path / ("b" if action == "another directory" else "run"), **more) as run:
            if action in LOOKS:
                LOOKS[action](run)
            arguments = {action: True} if action in ("overwrite", "force") else {}
            assert run.save(4, state(4), **arguments) and run.save(5, state(5))
            run.wait_until_finished()
            if action == "nothing":
                said = logged(key, caplog).after("restored nothing: ")
                assert "call restore_latest() before" in said and "another directory" in said
            else:
                assert "restored nothing" not in caplog.text, action
            assert caplog.text.count("restored nothing") == (action == "nothing")
        if action != "another directory":
            with runs(tmp_path / "run", **more) as run:
                run.rollback_to(3)
    with runs(tmp_path / "empty") as run:
        run.save(4, state(4))
    assert "restored nothing" not in caplog.text


@pytest.mark.parametrize("launcher", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_tasks_of_a_launcher_that_are_no_run(tmp_path, monkeypatch, caplog, launcher):
    key = "This is one of 4 tasks, and jax knows of one process: as one run they call jax.distributed."
    ckpt.save(tmp_path / "a", state(0))
    with pytest.raises(ckpt.CheckpointExists) as exists:
        ckpt.save(tmp_path / "a", state(0))
    assert "of 4 tasks" not in str(exists.value)
    monkeypatch.setenv(launcher, "4")
    with told(key, of=ckpt.CheckpointExists):
        ckpt.save(tmp_path / "a", state(0))
    with runs(tmp_path / "run") as first, runs(tmp_path / "run") as second:
        first.save(0, state(0))
        first.wait_until_finished()
        second.restore_latest(state(0))
        assert "taken over from" in caplog.text and key in caplog.text
        with told(key):
            first.save(1, state(1))
            first.wait_until_finished()


@pytest.mark.parametrize("given", [{"save_policy": when.first}, {"keep_policy": keep.latest}])
def test_a_policy_that_was_not_called(tmp_path, given):
    key = "is the function that makes a policy: write "
    with told(key, of=TypeError) as said:
        runs(tmp_path, **given)
    written = said.after(": write ").replace("...", "2")
    saved(tmp_path, [0, 1], **eval(f"dict({written})", {"ckpt": ckpt}))
    assert resumes(tmp_path, 0 if "save_policy" in given else 1)


def test_metrics_twice_or_an_object(tmp_path):
    with runs(tmp_path) as run:
        item = {"metrics": ckpt.Json({"loss": 2.0})}
        with told("pass the metrics by metrics=, or all of them as an"):
            run.save(0, params=state(0), items=item, metrics={"loss": 1.0})
        run.save(0, params=state(0), metrics={"loss": 1.0})
        run.save(1, params=state(1), items=item)
        run.wait_until_finished()
        assert (run.metrics(0), run.metrics(1)) == ({"loss": 1.0}, {"loss": 2.0})
        with told("an object that is to be an item of this name is passed as") as said:
            run.save(2, params=state(2), metrics=np.ones(2))  # pyright: ignore[reportArgumentType]
        items = eval(
            said.between("passed as items=", ", to save").replace("...", "one"), {"one": np.ones(2)}
        )
        run.save(2, params=state(2), items=items)
    with runs(tmp_path) as run:
        with told("an object that is to be an item of this name is passed as"):
            run.restore(2, params=state(0), metrics=np.zeros(2))
        found = run.restore(2, params=state(0), items={"metrics": np.zeros(2)})
        assert found["metrics"].tolist() == [1, 1]


def test_a_metric_that_no_step_has(tmp_path, caplog):
    best: dict[str, Any] = {"best_metric": "loss", "best_mode": "min", "max_to_keep": 1}
    with caplog.at_level(logging.WARNING), runs(tmp_path, **best) as run:
        for step in range(3):
            run.save(step, state(step))
    logged("by which steps are kept, so none is kept or deleted for it: pass it to save", caplog)
    assert resumes_unchanged(tmp_path, [0, 1, 2])
    with runs(tmp_path, **best) as run:
        run.restore_latest(state(0))["state"]  # pyright: ignore[reportOptionalSubscript]
        for step in range(3, 6):
            run.save(step, state(step), metrics={"loss": step})
        run.wait_until_finished()
        assert run.best_step() == 3
    assert resumes(tmp_path, 5)
