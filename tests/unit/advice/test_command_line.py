"""What ``ckpt`` refuses, and what it says to type: typed to the letter."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import ckpt_core as ckpt
from ckpt_core._directory.locks import reading
from tests.contract.advice.said import Said, fragment_of
from tests.support.command_line import Call, make_call  # noqa: F401 (fixture)

pytest.importorskip("typer")
W = np.arange(4.0, dtype=np.float32)
STATE = {"w": W}
FAST = ckpt.Options(durable=False)
ANY = "cli.py" + ": ckpt: "
_PYTHON = re.compile(r"\b(item|only|exclude|format|overwrite|split|step|rename)=")


def save(path: Any, *state: Any, **named: Any) -> None:
    ckpt.save(path, *state, options=FAST, **named)


def a_run(root: Path, *steps: int) -> None:
    for step in steps:
        save(root / str(step), {"w": W + step})


def right(path: Any, step: int = 0) -> bool:
    return np.array_equal(ckpt.load(path)["w"], W + step)


@pytest.fixture(name="says")
def make_says(call: Call):
    """Calls a command that ends with the message of a key, in which nothing of Python is."""

    def says(key: str, *arguments: Any) -> Said:
        code, _, err = call(*arguments)
        said = Said()
        said.text = err.strip()
        assert code == 2 and fragment_of(key) in said.text, (code, said.text)
        assert not _PYTHON.search(said.text), said.text
        return said

    return says


@pytest.fixture(name="does")
def make_does(call: Call):
    """Calls a command that succeeds; gives what it prints."""

    def does(*arguments: Any) -> str:
        code, out, err = call(*arguments)
        assert code == 0, err
        return out

    return does


# Copying


def test_copying_to_where_something_is(says: Any, does: Any, tmp_path: Path):
    for action in ("another", "delete"):
        one, other = tmp_path / action / "a", tmp_path / action / "b"
        save(one, STATE)
        save(other, {"w": W + 1})
        said = says("cli/_advice.py: , or delete that first (ckpt rm)", "cp", one, other)
        if action == "another":
            does("cp", one, other.with_name("c"))
            assert right(other, 1) and right(other.with_name("c"))
        else:
            does(*shlex.split(said.between("(ckpt ", ")")), other, "--yes")
            does("cp", one, other)
            assert right(other)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    says(
        "_directory/writing.py: choose another path, or move it away", "cp", one, tmp_path / "mine"
    )
    does("cp", one, tmp_path / "mine2")


def test_a_step_of_a_run_in_a_fast_directory(says: Any, does: Any, tmp_path: Path):
    run, fast = tmp_path / "run", tmp_path / "fast"
    with ckpt.Checkpointer(
        run, local_directory=fast, asynchronous=False, options=FAST
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": W + step})
    key = "cli/_local.py: name the persistent one, ckpt rm RUN --step N"
    said = says(key, "rm", "--local", fast, "--step", 2, "--yes")
    spelled = {"RUN": run, "N": 2}
    does(*(spelled.get(word, word) for word in said.after("one, ckpt ").split()), "--yes")
    with ckpt.Checkpointer(run, local_directory=fast) as checkpointer:
        assert checkpointer.all_steps() == [1]


def test_steps_of_what_has_none(says: Any, does: Any, tmp_path: Path):
    save(tmp_path / "a", STATE)
    says(
        "cli/_change.py: is no directory of steps: leave --step out",
        "cp",
        tmp_path / "a",
        tmp_path / "b",
        "--step",
        1,
    )
    does("cp", tmp_path / "a", tmp_path / "b")
    assert right(tmp_path / "b")


@pytest.mark.parametrize("action", ["delete", "another place"])
def test_another_save_of_a_step(says: Any, does: Any, tmp_path: Path, action: str):
    a_run(tmp_path / "one", 1)
    a_run(tmp_path / "two", 1)
    one, two = tmp_path / "one", tmp_path / "two"
    said = says("cli/_change.py: : delete it first, or copy to another place", "cp", one, two)
    if action == "delete":
        does("rm", said.text.split(" ")[1], "--yes")
        does("cp", one, two)
    else:
        does("cp", one, tmp_path / "three")
        assert right(tmp_path / "three" / "1", 1)
    assert right(two / "1", 1)


def test_copying_what_has_no_checksums(says: Any, does: Any, tmp_path: Path):
    safetensors.numpy.save_file(STATE, tmp_path / "a b.safetensors")
    key = "_copy.py: and has no checksums, so nothing of a copy could be verified: make a checkpoint of"
    said = says(key, "cp", tmp_path / "a b.safetensors", tmp_path / "c d")
    does(*shlex.split(said.between("`ckpt ", "`")))
    assert right(tmp_path / "c d")


# Deleting


def test_deleting_what_is_no_checkpoint(says: Any, does: Any, tmp_path: Path):
    a_run(tmp_path / "run", 1, 2)
    says(
        "cli/_change.py: : say which to delete with --step, or remove", "rm", tmp_path / "run", "-y"
    )
    does("rm", tmp_path / "run", "--step", 1, "-y")
    assert os.listdir(tmp_path / "run") == ["2"]
    (tmp_path / "link").symlink_to(tmp_path / "run" / "2")
    said = says(
        "cli/_change.py: : name the checkpoint itself, or unlink it", "rm", tmp_path / "link", "-y"
    )
    assert right(tmp_path / "link", 2)
    does("rm", said.between("is a link to ", ": name"), "-y")
    assert os.listdir(tmp_path / "run") == []
    a_run(tmp_path / "run", 3)
    says(
        "cli/_change.py: --step takes its steps from one directory of steps",
        *("rm", tmp_path / "run", tmp_path / "other", "--step", 3, "-y"),
    )
    does("rm", tmp_path / "run", "--step", 3, "-y")
    assert os.listdir(tmp_path / "run") == []


def test_nobody_to_be_asked(says: Any, does: Any, tmp_path: Path):
    save(tmp_path / "a", STATE)
    said = says(
        "cli/_change.py: nobody is there to be asked whether to delete: say --yes",
        "rm",
        tmp_path / "a",
    )
    assert right(tmp_path / "a")
    does("rm", tmp_path / "a", said.text.rpartition("say ")[2])
    assert not (tmp_path / "a").exists()


def test_deleting_what_is_being_read(says: Any, does: Any, tmp_path: Path):
    save(tmp_path / "a", STATE)
    with reading(str(tmp_path / "a" / "ckpt.json"), b""):
        says(
            "cli/_change.py: nothing of it was deleted; try again when that has ended",
            "rm",
            tmp_path / "a",
            "-y",
        )
        assert right(tmp_path / "a")
    does("rm", tmp_path / "a", "-y")


@pytest.mark.parametrize("each", [True, False])
def test_folders_of_orbax(says: Any, does: Any, tmp_path: Path, each: bool):
    """Each is a checkpoint of its own, says Orbax's file in it, or not even that is known."""
    for name in ("one", "two"):
        save(tmp_path / "own" / name, STATE)
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "own" / name / "state").rename(tmp_path / "run" / name)
        if each:
            (tmp_path / "own" / name / "_CHECKPOINT_METADATA").rename(
                tmp_path / "run" / name / "_CHECKPOINT_METADATA"
            )
    key = "cli/_change.py: that it is one checkpoint and no folder of several: "
    said = says(key, "rm", tmp_path / "run", "-y")
    assert ("name those" in said.text) == each
    if each:
        does("rm", tmp_path / "run" / "one", "-y")
    else:
        assert said.text.endswith("several: remove the directory itself")
        shutil.rmtree(tmp_path / "run" / "one")
    assert os.listdir(tmp_path / "run") == ["two"]


# Weights


def test_importing(says: Any, does: Any, tmp_path: Path):
    source, target = tmp_path / "a.npz", tmp_path / "a"
    np.savez(source, **STATE)
    does("import", source, target)
    np.savez(source, w=W + 1)
    said = Said()
    said.text = _error(says, "import", source, target)
    does("import", source, target, said.between("or add ", " to replace it"))
    assert right(target, 1)
    os.rename(source, tmp_path / "odd")
    (tmp_path / "odd").write_bytes(b"\0" * 8 + (tmp_path / "odd").read_bytes())
    typed = _error(says, "import", tmp_path / "odd", tmp_path / "b").partition(
        "say which it is with "
    )[2]
    assert typed.startswith("--from, if")
    safetensors.numpy.save_file(STATE, tmp_path / "c")
    said = says(
        "convert/_incoming.py: which are known by their name: rename it to",
        "import",
        tmp_path / "c",
        tmp_path / "d",
    )
    os.rename(tmp_path / "c", said.text.rpartition("rename it to ")[2])
    does("import", f"{tmp_path}/c.safetensors", tmp_path / "d", "--from", "safetensors")
    assert right(tmp_path / "d")


def _error(says: Any, *arguments: Any) -> str:
    return says(ANY, *arguments).text


def test_importing_what_is_ours(says: Any, does: Any, tmp_path: Path):
    save(tmp_path / "a", STATE)
    said = says(
        "convert/_checkpoints.py: is a checkpoint of ckpt: copy it with",
        "import",
        tmp_path / "a",
        tmp_path / "b",
    )
    does(*said.between("'ckpt ", "'").split(), tmp_path / "a", tmp_path / "b")
    assert right(tmp_path / "b")


def test_renames_and_formats(says: Any, does: Any, tmp_path: Path):
    np.savez(tmp_path / "a.npz", **STATE)
    arguments = ("import", tmp_path / "a.npz", tmp_path / "a", "--rename")
    says("cli/_convert.py: : it must be OLD=NEW", *arguments, "w")
    does(*arguments, "w=v")
    assert ckpt.load(tmp_path / "a")["v"].tolist() == W.tolist()
    save(tmp_path / "b", STATE)
    said = says(
        "cli/_convert.py: are written", "export", tmp_path / "b", tmp_path / "c", "--to", "gguf"
    )
    for name in said.between("only ", " are").split(", "):
        does("export", tmp_path / "b", tmp_path / f"c-{name}", "--to", name)


@pytest.mark.parametrize("action", ["another", "delete"])
def test_exporting_to_where_something_is(says: Any, does: Any, tmp_path: Path, action: str):
    save(tmp_path / "a", STATE)
    for name, key in {
        "x.safetensors": "convert/_safetensors.py: exists already: choose another path, or delete it",
        "x.npz": "convert/_outgoing.py: exists already: choose another path, or delete it",
    }.items():
        file = tmp_path / name
        file.write_text("mine")
        says(key, "export", tmp_path / "a", file)
        if action == "another":
            does("export", tmp_path / "a", tmp_path / f"other-{name}")
            assert file.read_text() == "mine"
        else:
            file.unlink()
            does("export", tmp_path / "a", file)
    says(
        "convert/_outgoing.py: an export is written to a disk: copy it from there",
        "export",
        tmp_path / "a",
        "gs://b/x.npz",
    )


def test_exporting_one_of_several_items(says: Any, does: Any, tmp_path: Path):
    save(tmp_path / "a", params=STATE, opt=STATE)
    assert "convert/_outgoing.py: : say which with item=, of"  # on the line: --item
    text = _error(says, "export", tmp_path / "a", tmp_path / "b.npz")
    option, names = text.partition("say which with ")[2].split(", of ")
    for name in names.split(", "):
        does("export", tmp_path / "a", tmp_path / f"{name}.npz", option, name)
        assert np.array_equal(np.load(tmp_path / f"{name}.npz")["w"], W)


def test_kinds_that_a_format_lacks(says: Any, does: Any, tmp_path: Path):
    import jax.numpy as jnp

    save(tmp_path / "a", {"w": W, "name": "text", "half": jnp.ones(2, jnp.bfloat16)})
    said = says(
        "convert/_npz_out.py: numpy has no such dtype: write safetensors, or leave them out with",
        "export",
        tmp_path / "a",
        tmp_path / "b.npz",
    )
    typed = shlex.split(said.after("leave them out with "))
    does("export", tmp_path / "a", tmp_path / "b.npz", *typed)
    assert list(np.load(tmp_path / "b.npz")) == ["w"]
    does("export", tmp_path / "a", tmp_path / "b.safetensors", "--exclude", "name")
    assert set(safetensors.numpy.load_file(tmp_path / "b.safetensors")) == {"w", "half"}


# Looking


def test_more_than_is_shown(call: Call, does: Any, tmp_path: Path):
    many = {f"l{i:03}": np.float32(i) for i in range(60)}
    (tmp_path / "files").mkdir()
    for name in many:
        (tmp_path / "files" / name).write_text("")
    save(tmp_path / "a", params=many, files=ckpt.Files(tmp_path / "files"))
    covers = ["cli/_look.py: more: --leaf shows all[/dim]"]
    out = does("show", tmp_path / "a")
    assert covers and out.count("more: --leaf shows all") == 2
    whole = does("show", tmp_path / "a", "--leaf")
    assert whole.count("l059") == out.count("l059") + 2
    save(
        tmp_path / "b",
        params={
            "other": {"x": np.float32(1)},
            **{name: np.float32(-1) for name in list(many)[:50]},
        },
    )
    covers = [
        "cli/_numbers.py: has: --limit shows more",
        "cli/_numbers.py: leaves more: --limit shows more",
    ]
    code, out, _ = call("diff", tmp_path / "a", tmp_path / "b", "--limit", 2)
    assert code == 1 and covers and out.count("--limit shows more") >= 2
    code, out, _ = call("diff", tmp_path / "a", tmp_path / "b", "--limit", 100)
    assert "shows more" not in out and "l059" in out


def test_the_page_of_a_report(says: Any, does: Any, tmp_path: Path):
    a_run(tmp_path / "run", 1)
    said = says(
        "cli/_report.py: is a directory: say the name of the page with -o",
        "report",
        tmp_path / "run",
        "-o",
        tmp_path,
    )
    does("report", tmp_path / "run", said.text.rpartition("with ")[2], tmp_path / "page.html")
    (tmp_path / "mine").write_text("mine")
    says(
        "cli/_report.py: exists already, and is no page: choose another name",
        "report",
        tmp_path / "run",
        "-o",
        tmp_path / "mine",
    )
    assert (tmp_path / "mine").read_text() == "mine"
    does("report", tmp_path / "run", "-o", tmp_path / "other.html")


def test_the_plan_is_code_that_runs(does: Any, tmp_path: Path):
    out = does(
        "plan",
        *("--state-bytes", "1GB", "--step-secs", "1", "--mtbf", "10", "--host-rate", "1GB"),
        tmp_path / "a b",
        "--local",
        tmp_path / "local",
        "--mib",
        1,
    )
    covers = "cli/_plan.py: , save_interval_steps="
    code = next(line.strip() for line in out.splitlines() if covers and "Checkpointer(" in line)
    names = {"Checkpointer": ckpt.Checkpointer, "ckpt": ckpt}
    with eval(code, names) as run:
        run.save(0, STATE)
    assert right(tmp_path / "a b" / "0")


def test_what_a_doctor_says_to_type(does: Any, tmp_path: Path):
    from ckpt_core._doctor import findings

    dead = tmp_path / "a b" / ".ckpt-tmp-dead"
    (found,) = findings.of_directory([], [str(dead)], str(tmp_path / "a b"))
    covers = "_doctor/findings.py: left by writers that have ended: ckpt gc"
    a_run(tmp_path / "a b", 1)
    assert covers
    does(*shlex.split(found.text.partition("ckpt ")[2].partition(" (the next")[0]))
    assert right(tmp_path / "a b" / "1", 1)


def test_targets_of_an_export(call: Any, tmp_path: Path):
    with ckpt.Checkpointer(tmp_path / "run", options=ckpt.Options(durable=False)) as run:
        for step in (0, 1):
            run.save(step, model={"w": np.ones(3)})
    source = tmp_path / "run" / "1"
    for target, key in (
        (
            "out.h5",
            "cli/_convert.py: is no format that is written: name a file that ends in .safetensors",
        ),
        ("run", "convert/_outgoing.py: is a directory of checkpoints: name another target"),
        (
            "run/0",
            "convert/_outgoing.py: , which would no longer be what was saved: name another target",
        ),
        ("run/0/w.npz", "convert/_outgoing.py: lies inside the checkpoint "),
    ):
        code, _, said = call("export", source, tmp_path / target)
        assert code == 2 and key.partition(".py: ")[2] in said.replace("\n", " "), said
    assert ckpt.verify(tmp_path / "run" / "0").ok and not (tmp_path / "out.h5").exists()
    assert call("export", source, tmp_path / "out.npz")[0] == 0
    assert call("export", source, tmp_path / "out.h5", "--to", "safetensors")[0] == 0
