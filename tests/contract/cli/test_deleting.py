"""``ckpt rm`` and ``gc --dry-run``, and what ended runs left in fast directories."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.command_line import (
    Call,
    leave_unfinished,
    make_call,  # noqa: F401 (fixture)
)
from tests.support.stores import keys_at, tree, value_at

pytest.importorskip("typer")


def a_run(root: object, *steps: int) -> None:
    for step in steps:
        ckpt.save(f"{root}/{step}", tree(step))


def while_read(path: Path, call: Call, *arguments: object) -> tuple[int, str, str]:
    """What a command reports while a checkpoint is being read."""
    reported: list[tuple[int, str, str]] = []

    def only(*_: object) -> bool:
        if not reported:
            reported.append(call(*arguments))
        return True

    ckpt.load(path, only=only)
    return reported[0]


def test_steps_of_a_run(call, store):
    a_run(store, 1, 2, 3)
    code, out, _ = call("rm", store, "--step", 1, "--step", 3, "--yes")
    assert code == 0 and "2 checkpoints deleted" in out
    assert json.loads(call("ls", store, "--json")[1])["steps"][0]["step"] == 2
    assert value_at(f"{store}/2") == 2
    code, _, err = call("rm", store, "--step", 2, "--step", 9, "-y")
    assert code == 2 and "9" in err
    assert value_at(f"{store}/2") == 2


def test_the_directory_that_counts_goes_last(call, tmp_path):
    for name, value in (("5", 1), ("000005", 2)):
        ckpt.save(tmp_path / name, tree(value))
    code, _, err = while_read(tmp_path / "000005", call, "rm", tmp_path, "--step", 5, "--yes")
    assert code == 2 and "000005 is being read" in err
    assert os.listdir(tmp_path) == ["000005"]
    ckpt.save(tmp_path / "5", tree(3))
    code, out, _ = call("rm", tmp_path, "--step", 5, "--step", 5, "--yes")
    assert code == 0 and "2 checkpoints deleted" in out and os.listdir(tmp_path) == []


@pytest.mark.parametrize("by_path", [False, True])
def test_a_deleted_step_does_not_come_back_from_a_local_directory(call, tmp_path, by_path):
    run, local = tmp_path / "run", tmp_path / "local"
    with ckpt.Checkpointer(run, local_directory=local, asynchronous=False) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, tree(step))
    named = (run / "3",) if by_path else (run, "--step", 3)
    assert call("rm", *named, "--yes")[0] == 0
    with ckpt.Checkpointer(run, local_directory=local) as checkpointer:
        assert checkpointer.all_steps() == [1, 2]
        restored = checkpointer.restore_latest(tree(0))
        assert restored is not None
        assert restored.step == 2


def test_checkpoints_by_their_paths_all_or_none(call, tmp_path):
    a_run(tmp_path, 1, 2)
    (tmp_path / "notes").mkdir()
    code, _, err = call("rm", tmp_path / "1", tmp_path / "notes", "-y")
    assert code == 2 and "notes is no checkpoint: nothing was deleted" in err
    assert value_at(tmp_path / "1") == 1
    assert call("rm", tmp_path / "1", f"{tmp_path}/2/", tmp_path / "1", "-y")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["notes"]


def test_what_is_refused(call, tmp_path):
    a_run(tmp_path / "run", 1)
    (tmp_path / "link").symlink_to(tmp_path / "run" / "1")
    for path, reported in [
        (tmp_path / "run", "say which to delete with --step"),
        (tmp_path / "link", "is a link to"),
        (tmp_path / "nothing", "is no checkpoint"),
        (tmp_path / "run" / "1" / "state", "is a part of the checkpoint"),
    ]:
        code, _, err = call("rm", path, "-y")
        assert code == 2 and reported in err, path
    code, out, err = call("rm", tmp_path / "run" / "1")  # no terminal, and no --yes
    assert code == 2 and "--yes" in err and "state" in out
    code, _, err = while_read(tmp_path / "run/1", call, "rm", tmp_path / "run" / "1", "-y")
    assert code == 2 and "is being read" in err
    assert value_at(tmp_path / "run" / "1") == 1


def test_a_damaged_one_and_its_linked_neighbour(call, tmp_path):
    big = {"w": tree(1), "big": np.arange(100_000.0)}
    with ckpt.Checkpointer(tmp_path) as run:
        for step in (1, 2):
            run.save(step, big)
    (tmp_path / "1" / "ckpt.json").write_text("{")
    code, out, _ = call("rm", tmp_path / "1", "-y")
    assert code == 0 and "damaged" in out
    assert ckpt.verify(tmp_path / "2").ok


def test_a_dry_run_reports_and_deletes_nothing(call, tmp_path):
    a_run(tmp_path, 1)
    leave_unfinished(tmp_path / "2")
    (left,) = tmp_path.glob(".ckpt-tmp.2.*")
    code, out, _ = call("gc", tmp_path, "--dry-run")
    assert code == 0 and "1 would be removed" in out and left.is_dir()
    reported = json.loads(call("gc", tmp_path, "--dry-run", "--json")[1])
    assert reported == {"directory": str(tmp_path), "deleted": False, "names": [left.name]}
    assert "1 removed" in call("gc", tmp_path)[1] and not left.exists()
    assert call("gc", tmp_path / "nothing")[0] == 2


def test_a_dry_run_in_a_store(call, store):
    a_run(store, 1)
    keys_at(f"{store}/2").put(".attempt.dead.owner", b"00000000-17-5 1 somebody")
    keys_at(f"{store}/2").put(".attempt.dead.state!0_METADATA", b"{}")
    before = keys_at(store).list()
    assert "2 would be removed" in call("gc", store, "--dry-run")[1]
    assert keys_at(store).list() == before
    assert "2 removed" in call("gc", store)[1]


def test_a_folder_of_checkpoints_of_orbax_is_none(call, tmp_path):
    for name in ("best", "final"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        for sign in ("_METADATA", "_CHECKPOINT_METADATA"):
            described = {"item_handlers": None, "tree_metadata": {}}
            (tmp_path / "mine" / name / sign).write_text(json.dumps(described))
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    code, _, err = call("rm", tmp_path / "mine", "-y")
    assert code == 2 and "name those" in err
    (tmp_path / "20" / "default").mkdir(
        parents=True
    )  # as Orbax wrote steps before it described them
    (tmp_path / "20" / "default" / "_METADATA").write_text('{"tree_metadata": {}}')
    assert "is a part of" in call("rm", tmp_path / "20" / "default", "-y")[2]
    assert call("rm", tmp_path / "mine" / "best", "-y")[0] == 0
    assert sorted(os.listdir(tmp_path / "mine")) == ["final", "notes.txt"]


MIB = 2**20
NEVER = ckpt.when.at_steps([0])


def state(value: float, mib: int = 1) -> dict[str, Any]:
    return {"w": np.full(mib * MIB // 4, value, np.float32)}


def open_run(tmp_path: Path, name: str, **more: Any) -> ckpt.Checkpointer:
    options = ckpt.Options(persist_policy=NEVER, **more)
    return ckpt.Checkpointer(
        tmp_path / name, local_directory=tmp_path / "local", asynchronous=False, options=options
    )


def train(tmp_path: Path, name: str, *, mib: int = 1, **more: Any) -> Path:
    """A run that has ended; its folder."""
    before = folders(tmp_path)
    with open_run(tmp_path, name, **more) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step, state(step, mib))
    (made,) = folders(tmp_path) - before
    os.utime(made)
    return made


def folders(tmp_path: Path) -> set[Path]:
    return set((tmp_path / "local").glob("run-*"))


def runs_in(call: Any, tmp_path: Path) -> list[dict[str, Any]]:
    code, out, _ = call("ls", "--local", tmp_path / "local", "--json")
    assert code == 0
    return json.loads(out)["runs"]


def test_runs_are_listed(call, tmp_path):
    first = train(tmp_path, "a")
    (tmp_path / "local" / "notes").mkdir()
    with open_run(tmp_path, "b") as live:
        live.save(7, state(7))
        reported = {run["path"]: run for run in runs_in(call, tmp_path)}
        assert len(reported) == 2
        ended_run = reported.pop(str(first))
        (living,) = reported.values()
        assert (ended_run["steps"], ended_run["in_use"], ended_run["mine"]) == ([1], False, True)
        assert (living["steps"], living["in_use"]) == ([7], True)
        assert (ended_run["persistent"], living["persistent"]) == (
            str(tmp_path / "a"),
            str(tmp_path / "b"),
        )
        assert MIB < ended_run["size_bytes"] < 2 * MIB
        text = call("ls", "--local", tmp_path / "local")[1]
        assert "in use" in text and "ended" in text
        assert tmp_path.name in text and "/b" in text  # the directory of each run
    assert sorted(path.name for path in (tmp_path / "local").iterdir()) == sorted(
        ["notes", *(path.name for path in folders(tmp_path))]
    )


def test_what_ended_runs_left_is_removed_and_no_more(call, tmp_path):
    for name in "ab":
        train(tmp_path, name)
    keep = tmp_path / "local" / "notes"
    keep.mkdir()
    with open_run(tmp_path, "c") as live:
        live.save(7, state(7))
        code, out, _ = call("rm", "--local", tmp_path / "local", "--yes")
        assert code == 0 and "2 of 2 runs removed" in out
        assert [run["in_use"] for run in runs_in(call, tmp_path)] == [True]
        assert keep.is_dir()
        assert live.load(7)["w"][0] == 7
        assert live.save(8, state(8))
        (name,) = (path.name for path in folders(tmp_path))
        code, _, err = call("rm", "--local", tmp_path / "local", "--run", name, "--yes")
        assert code == 2 and "in use by a run that lives" in err
    # the run that was removed goes on from its persistent directory
    with open_run(tmp_path, "a") as again:
        found = again.restore_latest(state(9))
        assert found is not None and found.step == 0


def test_a_run_of_another_process_lives(call, tmp_path):
    """Its lock says so; when it is killed, it has ended."""
    code = (
        "import sys, numpy as np, ckpt_core as ckpt\n"
        "options = ckpt.Options(persist_policy=ckpt.when.at_steps([0]))\n"
        f"c = ckpt.Checkpointer({str(tmp_path / 'a')!r}, local_directory={str(tmp_path / 'local')!r}, options=options)\n"
        "c.save(3, {'w': np.ones(4)}); c.wait_until_finished()\n"
        "print('saved', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"saved\n"
        (run,) = runs_in(call, tmp_path)
        assert run["in_use"]
        assert "nothing was removed" in call("rm", "--local", tmp_path / "local", "--yes")[1]
        assert runs_in(call, tmp_path) == [run]
    finally:
        child.kill()
        child.communicate(timeout=60)
    assert not runs_in(call, tmp_path)[0]["in_use"]
    local, name = tmp_path / "local", os.path.basename(run["path"])
    code, _, err = call("rm", "--local", local, "--run", "run-x", "--yes")
    assert code == 2 and name in err
    assert "1 of 1 run removed" in call("rm", "--local", local, "--run", name, "--yes")[1]
    assert not os.path.lexists(run["path"])
