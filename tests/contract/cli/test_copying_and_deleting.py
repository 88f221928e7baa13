"""`ckpt cp`, `rm` and `gc`: steps that are copied, those of a run that went back, and what is deleted."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import children, seams
from tests.support.command_line import Call, leave_unfinished, make_call  # noqa: F401 (fixture)
from tests.support.damage import turn_a_bit
from tests.support.stores import keys_at, tree, value_at
from tests.support.takeovers import make_directory  # noqa: F401 (fixture)

pytest.importorskip("typer")
ZSTD = ckpt.Options(compression="zstd")
QUICK = ckpt.Options(durable=False)


@pytest.mark.parametrize("options", [None, ZSTD], ids=["plain", "zstd"])
def test_there_and_back(call, store, tmp_path, options):
    ckpt.save(tmp_path / "a", tree(1), options=options, metadata={"note": "[x]"})
    for source, target in [
        (tmp_path / "a", f"{store}/b"),
        (f"{store}/b", f"{store}/c"),
        (f"{store}/c", tmp_path / "d"),
        (tmp_path / "d", tmp_path / "e"),
    ]:
        code, out, err = call("cp", source, target)
        assert (code, err) == (0, "") and "->" in out
        assert value_at(str(target)) == 1
        assert ckpt.verify(target).ok
        assert ckpt.inspect(target).metadata == {"note": "[x]"}
    names = {file.relative_to(tmp_path / "a") for file in (tmp_path / "a").rglob("*")}
    assert {file.relative_to(tmp_path / "e") for file in (tmp_path / "e").rglob("*")} == names
    # what was copied can be replaced and deleted like any other
    ckpt.save(f"{store}/b", tree(2), overwrite=True)
    assert value_at(f"{store}/b") == 2 and ckpt.verify(f"{store}/b").ok
    ckpt.save(f"{store}/fresh", tree(2))
    assert len(keys_at(f"{store}/b").list()) == len(keys_at(f"{store}/fresh").list())


def test_steps_are_copied_once(call, store, tmp_path):
    with ckpt.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        for step in range(3):
            checkpointer.save(step, tree(step))
    assert call("cp", tmp_path / "run", store, "--step", "1")[0] == 0
    code, out, _ = call("cp", tmp_path / "run", store)
    assert code == 0 and out.count("->") == 2 and "is there already" in out
    with ckpt.Checkpointer(store) as checkpointer:
        assert checkpointer.all_steps() == [0, 1, 2]
        assert checkpointer.restore_latest(tree(9)).state["n"] == 2
        checkpointer.delete(1)
        assert checkpointer.save(3, tree(3))
    ckpt.save(f"{store}/1", tree(7))
    code, _, err = call("cp", tmp_path / "run", store)
    assert code == 2 and "another save" in err
    assert value_at(f"{store}/1") == 7


def test_damage_is_not_copied(call, store, tmp_path):
    ckpt.save(tmp_path / "a", tree(1))
    turn_a_bit(tmp_path / "a")
    code, _, err = call("cp", tmp_path / "a", f"{store}/a")
    assert code == 2 and "was not copied" in err
    assert keys_at(f"{store}/a").list() == []


KILLED_COPY = """
import os, signal, sys
from tests.support import seams
from ckpt_core.cli import main
seams.at(None, "commit", before=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
sys.argv = ["ckpt", "cp", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_a_copy_that_fails_or_is_killed_is_not_in_the_way_of_the_next(
    call, tmp_path, store, monkeypatch, kind
):
    frozen = jnp.ones(1 << 18)  # which the second step shares with the first
    with ckpt.Checkpointer(tmp_path / "run", asynchronous=False) as run:
        for step in (0, 1):
            run.save(step, tree(step) | {"frozen": frozen})
    source, target = tmp_path / "run/1", str(tmp_path / "b") if kind == "disk" else f"{store}/b"
    assert any(source.rglob("ocdbt.linked"))
    with monkeypatch.context() as patch:
        seams.at(patch, "commit", before=seams.fail())
        assert call("cp", source, target)[0] == 2
    assert kind == "disk" or keys_at(target).list() == []
    command = [sys.executable, "-c", KILLED_COPY, str(source), target]
    done = subprocess.run(command, env=children.environment(), timeout=150, check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load(target)
    assert call("cp", source, target)[0] == 0
    assert ckpt.load(target)["n"] == 1 and ckpt.verify(target).ok


def test_large_data_files_and_odd_names(call, store, tmp_path):
    """Of a data file above 32 MiB a record on a disk has the digest of a part."""
    items = {"big": {"w": np.arange(5_000_000.0)}, "a%41": {"w": np.ones(3000)}, "b#?": None}
    ckpt.save(tmp_path / "a", items=items)
    ckpt.save(f"{store}/x%41", items=items)
    for source, target in [
        (tmp_path / "a", f"{store}/b"),
        (f"{store}/b", tmp_path / "c"),
        (f"{store}/x%41", tmp_path / "d"),
    ]:
        code, _, err = call("cp", source, target)
        assert (code, err) == (0, "")
        assert ckpt.verify(target).ok
        loaded = ckpt.load(target)
        assert loaded["big"]["w"][-1] == 4_999_999 and loaded["a%41"]["w"].sum() == 3000
    keys = keys_at(f"{store}/b")
    large = max(keys.list(), key=lambda key: len(keys.get(key) or b""))
    data = keys.get(large) or b""
    keys.put(large, data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    assert not ckpt.verify(f"{store}/b").ok


def test_a_run_is_copied_with_what_is_said_of_it(call, tmp_path):
    with ckpt.Checkpointer(tmp_path / "run") as run:
        run.save(0, tree(0))
        run.write_run_metadata({"lr": 0.1})
    for _ in range(2):
        code, _, err = call("cp", tmp_path / "run", tmp_path / "copy")
        assert (code, err) == (0, "")
    with ckpt.Checkpointer(tmp_path / "copy", read_only=True) as copy:
        assert copy.run_metadata == {"lr": 0.1} and copy.all_steps() == [0]
    with ckpt.Checkpointer(tmp_path / "run") as run:
        restored = run.restore_latest(tree(0))
        assert restored is not None and restored["state"]
        run.save(1, tree(1))
        run.write_run_metadata({"lr": 0.2})
    code, out, _ = call("cp", tmp_path / "run", tmp_path / "copy")
    assert code == 0 and "has other metadata of the run, which stays" in out
    with ckpt.Checkpointer(tmp_path / "copy", read_only=True) as copy:
        assert copy.run_metadata == {"lr": 0.1} and copy.all_steps() == [0, 1]


def go_on(run: Path, *steps: int, after: int | None = None) -> None:
    """Saves steps; their values tell the branch: that of step 3 is 3, and 103 once the run went back."""
    with ckpt.Checkpointer(run, options=QUICK, asynchronous=False) as checkpointer:
        back = after is not None
        restored = checkpointer.restore(after, tree(0)) if back else None
        assert restored is None or restored["state"]
        for step in steps:
            assert checkpointer.save(step, tree(step + 100 * back))


def went_back(root: Path, copied: Callable[[Path, Path], Any]) -> tuple[Path, Path]:
    """A run with steps 0 1 2 3' 4', and its copy, which had 0 to 6 before: 0 1 2 3' 4' 5 6."""
    run, copy = root / "run", root / "copy"
    go_on(run, *range(7))
    shutil.copytree(run, copy)
    go_on(run, 3, 4, after=2)
    copied(run, copy)
    return run, copy


def rsync(run: Path, copy: Path) -> None:
    """Without deletion, as is the default."""
    for step in ckpt.Checkpointer(run, read_only=True).all_steps():
        shutil.rmtree(copy / str(step), ignore_errors=True)
        shutil.copytree(run / str(step), copy / str(step))


def lines_about(text: str) -> list[str]:
    return [line for line in text.splitlines() if "another save than step 4" in line]


def test_it_is_shown(call, tmp_path):
    run, copy = went_back(tmp_path, rsync)
    for command in ("ls", "verify"):
        code, out, _ = call(command, copy)
        assert code == 0 and len(lines_about(out)) == 1, out
        assert lines_about(out)[0].startswith("steps 5, 6 continue another save than step 4")
        said = json.loads(call(command, copy, "--json")[1])
        assert said["strays"] == {"5": 4, "6": 4}
        assert "another save" not in call(command, run)[1]
        assert json.loads(call(command, run, "--json")[1])["strays"] == {}
    code, out, _ = call("doctor", copy, "--mib", "1")
    assert code == 1 and len(lines_about(out)) == 1 and "problem" in lines_about(out)[0]
    assert "another save" not in call("doctor", run, "--mib", "1")[1]


@pytest.mark.parametrize("last", [4, 6])
def test_what_hangs_together_is_restored_and_the_other_named(tmp_path, last):
    """The newest step of the copy is not of the run; one that is named is restored all the same, with a warning."""
    _, copy = went_back(tmp_path, rsync)
    with ckpt.Checkpointer(copy, options=QUICK) as checkpointer:
        with pytest.raises(ckpt.CheckpointError, match="step 6 continues another save than step 4"):
            checkpointer.restore_latest(tree(0), strict_latest=True)
        with pytest.warns(RuntimeWarning, match="step [56] .* another save than step 4") as caught:
            restored = checkpointer.restore_latest(tree(0))
        assert restored is not None and restored.step == 4 and restored["state"]["n"] == 104
        assert [one.filename for one in caught] == [__file__] * 2
        if last == 6:  # the way out that the warning names
            assert "restore(6, ...)" in str(caught[0].message)
            with pytest.warns(RuntimeWarning, match=r"restore\(4, \.\.\.\)") as caught:
                assert checkpointer.restore(6, tree(0)).state["n"] == 6
            assert caught[0].filename == __file__
        checkpointer.save(last + 1, tree(last + 101))
    newest = {4: {0: 0, 1: 1, 2: 2, 3: 103, 4: 104, 5: 105}, 6: {4: 104, 5: 5, 6: 6, 7: 107}}
    with ckpt.Checkpointer(copy, read_only=True) as checkpointer:
        found = {step: checkpointer.load(step)["n"] for step in checkpointer.all_steps()}
    assert found | newest[last] == found and max(found) == last + 1


@pytest.mark.parametrize("again", [True, False])
def test_a_program_that_replaces_older_steps_leaves_the_newest(call, tmp_path, caplog, again):
    """It adds metrics to each, and is killed halfway, say: no training went on from what it saved."""
    run = tmp_path / "run"
    go_on(run, *range(7))
    checkpointer = ckpt.Checkpointer(run, options=QUICK, asynchronous=False)
    for step in (1, 2, 4):
        restored = checkpointer.restore(step, tree(0))
        if again:  # a program for each
            checkpointer.close()
            checkpointer = ckpt.Checkpointer(run, options=QUICK, asynchronous=False)
            restored = checkpointer.restore(step, tree(0))
        state, metrics = restored.state, {"loss": 1.0}
        assert checkpointer.save(step, state, metrics=metrics, overwrite=True)
    checkpointer.close()
    with ckpt.Checkpointer(run, options=QUICK, asynchronous=False) as checkpointer:
        restored = checkpointer.restore_latest(tree(0))
        assert restored is not None and restored.state["n"] == restored.step == 6
        checkpointer.save(7, tree(7))
        assert checkpointer.all_steps() == [*range(8)]
    assert "another save" not in caplog.text
    assert json.loads(call("ls", run, "--json")[1])["strays"] == {}


def test_what_a_run_does_itself_is_no_stray(call, tmp_path, caplog):
    run = tmp_path / "run"
    go_on(run, *range(4))
    go_on(run, 4, 5, after=2)  # leaves step 3
    with ckpt.Checkpointer(run, options=QUICK, asynchronous=False) as checkpointer:
        restored = checkpointer.restore_latest(tree(0))
        assert restored is not None and restored["state"]
        assert checkpointer.save(6, tree(6)) and checkpointer.save(7, tree(7))
        assert checkpointer.save(6, tree(66), overwrite=True)  # beneath step 7, which stays
        checkpointer.delete(4)
    with ckpt.Checkpointer(run, read_only=True) as checkpointer:
        assert checkpointer.restore_latest(tree(0)) is not None
    assert "another save" not in caplog.text
    assert json.loads(call("ls", run, "--json")[1])["strays"] == {}


def test_cp_names_all_conflicts_before_it_copies(call, tmp_path, directory):
    run, copy = tmp_path / "source", directory
    go_on(run, *range(7))
    assert call("cp", run, copy)[0] == 0
    go_on(run, 3, 4, after=2)
    go_on(run, 7, after=4)
    code, _, err = call("cp", run, copy)
    said = " ".join(err.split())
    assert code == 2 and "steps 3, 4" in said and "steps 5, 6" in said
    assert f"--mirror {'deletes' if '://' in copy else 'moves'} them" in said
    assert [value_at(f"{copy}/{step}") for step in range(7)] == [*range(7)]
    assert ckpt.Checkpointer(copy, read_only=True).latest_step() == 6
    code, out, err = call("cp", run, copy, "--mirror")
    assert (code, err) == (0, "") and "3, 4, 5, 6" in out
    with ckpt.Checkpointer(copy, options=QUICK) as checkpointer:
        assert checkpointer.all_steps() == [0, 1, 2, 3, 4, 7]
        assert [checkpointer.load(step)["n"] for step in (2, 3, 4, 7)] == [2, 103, 104, 107]
    if "://" not in copy:
        assert sorted(path.name for path in Path(copy, "retired").iterdir()) == [*"3456"]
    assert call("cp", run, copy, "--mirror")[0] == 0


def test_cp_names_what_is_not_of_the_source(call, tmp_path):
    """Nothing is in the way of the copy; but a restart would go on from what the source has left."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    go_on(run, 0, 1, 2, 4, 6)
    assert call("cp", run, copy)[0] == 0
    go_on(run, 3, 5, after=2)
    code, out, _ = call("cp", run, copy)
    assert code == 1 and "steps 4, 6" in " ".join(out.split()) and "--mirror" in out
    assert json.loads(call("ls", copy, "--json")[1])["steps"][-2]["step"] == 5
    (copy / "5/ckpt.json").write_bytes(b"")  # of another tool that was interrupted
    assert call("cp", run, copy)[0] == 2 and call("cp", run, copy, "--mirror")[0] == 0
    assert ckpt.Checkpointer(copy, read_only=True).all_steps() == [0, 1, 2, 3, 5]
    assert value_at(f"{copy}/5") == 105


def test_an_archive_keeps_what_retention_deleted_at_the_source(call, tmp_path):
    run, copy = tmp_path / "run", tmp_path / "copy"
    for step in range(6):
        go_on(run, step, after=step - 1 if step else None)
        assert call("cp", run, copy)[0] == 0
        if step > 1:
            shutil.rmtree(run / str(step - 2))
    assert call("cp", run, copy, "--mirror")[0] == 0
    assert ckpt.Checkpointer(copy, read_only=True).all_steps() == [*range(6)]


@pytest.mark.parametrize("left", [range(10, 60, 10), range(3, 40)])
def test_left_steps_of_other_numbers_and_many_of_them(call, tmp_path, left):
    run, copy = tmp_path / "run", tmp_path / "copy"
    go_on(run, 0, 1, 2, *left)
    shutil.copytree(run, copy)
    go_on(run, 12, 17, after=left[0] if left[0] == 10 else 2)
    rsync(run, copy)
    with ckpt.Checkpointer(copy, options=QUICK) as checkpointer, pytest.warns(RuntimeWarning):
        restored = checkpointer.restore_latest(tree(0))
    assert restored is not None and restored.state["n"] == 117
    assert {*json.loads(call("ls", copy, "--json")[1])["strays"]} >= {str(left[-1])}


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
