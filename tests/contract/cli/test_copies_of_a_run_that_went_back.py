"""A run goes back and its copy does not: what the copy holds of the abandoned branch is shown, warned of, and retired on request."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from tests.support.stores import tree, value_at
from tests.support.takeovers import make_directory  # noqa: F401 (fixture)

pytest.importorskip("typer")
QUICK = ckpt.Options(durable=False)


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
