"""The command line as a user meets it: what it prints, what a script reads, how it exits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.command_line import LOADED, make_call, start  # noqa: F401 (fixture)
from tests.support.damage import turn_a_bit
from tests.support.refusals import refuse

pytest.importorskip("typer")


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("cli") / "run"
    with ckpt.Checkpointer(directory, asynchronous=False) as checkpointer:
        for step in (1, 2, 10):
            checkpointer.save(
                step,
                model={"w": jax.numpy.ones((64, 64)), "name": "a"},
                opt=[jax.numpy.zeros(3, "bfloat16") for _ in range(9)],
                metrics={"loss": 1 / step},
                metadata={"note": "[bold]x"},
            )
    return directory


def test_ls(call, steps: Path):
    code, out, _ = call("ls", steps)
    assert code == 0
    rows = [line for line in out.splitlines() if "model, opt" in line]
    assert len(rows) == 3 and "loss 0.5" in rows[1] and "16.1 KiB" in rows[1]
    code, out, _ = call("ls", steps, "--json")
    reported = json.loads(out)
    assert code == 0 and [row["step"] for row in reported["steps"]] == [1, 2, 10]
    assert reported["steps"][0]["items"]["opt"] == {"form": "tree", "leaves": 9, "array_bytes": 54}


def test_ls_of_what_has_no_steps(call, tmp_path: Path):
    code, _, err = call("ls", tmp_path / "nothing")
    assert code == 2 and "no such directory" in err
    assert call("ls", tmp_path)[:2] == (0, f"{tmp_path}: no steps\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", [("ls",), ("ls", "--local"), ("report",)])
def test_a_directory_that_cannot_be_looked_at(
    call, steps: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
):
    refuse(monkeypatch, steps, calls=("stat", "lstat"), below=False)
    code, _, err = call(*command, steps)
    assert code == 2 and "Permission denied" in err and "no such directory" not in err


def test_show(call, steps: Path):
    code, out, _ = call("show", steps / "10")
    assert code == 0
    _, first, *items = out.splitlines()
    assert first.startswith("step 10, saved 20") and ", 16.1 KiB of arrays, " in first
    assert items[:2] == ["model: 2 leaves, 16.0 KiB", "opt: 9 leaves, 54 B"]
    assert "and 4 more: --leaf shows all" in out and "[bold]x" in out and "loss 0.1" in out
    files = "manifest.ocdbt ocdbt.process_0/d/ _METADATA _sharding array_metadatas"
    assert all(name in out for name in [*files.split(), "commit_success.txt", "ckpt.json"])
    assert "unknown to ckpt" not in out
    (steps / "10/left.over").write_text("")
    assert "unknown to ckpt" in call("show", steps / "10")[1]
    (steps / "10/left.over").unlink()
    code, out, _ = call("show", steps / "10", "--leaf")
    assert code == 0 and "more:" not in out and out.count("bfloat16") == 9
    code, out, _ = call("show", steps / "10", "--json")
    reported = json.loads(out)
    assert (
        code == 0
        and len(reported["leaves"]["opt"]) == 9
        and reported["metadata"] == {"note": "[bold]x"}
    )
    found = {name for _, _, names in os.walk(steps / "10") for name in names}
    assert sum(part["files"] for part in reported["files"]) >= len(found)
    assert call("show", steps / "11")[0] == 2


def test_show_of_what_orbax_wrote(call, tmp_path: Path):
    ocp = pytest.importorskip("orbax.checkpoint").v1
    ocp.save(str(tmp_path / "one"), {"w": jax.numpy.ones(3)})
    code, out, _ = call("show", tmp_path / "one")
    assert code == 0 and "written by Orbax, without checksums" in out
    assert "unknown to ckpt" not in out
    code, out, _ = call("verify", tmp_path / "one")
    assert code == 1 and "nothing can be verified" in out


def test_verify(call, steps: Path, tmp_path: Path):
    code, out, _ = call("verify", steps / "1")
    assert code == 0 and out.startswith("ok: ")
    path = tmp_path / "one"
    ckpt.save(path, {"w": np.arange(1000.0)})
    data = turn_a_bit(path)
    code, out, _ = call("verify", path)
    assert code == 1 and "not ok" in out and data.name in out
    code, out, _ = call("verify", path, "--json")
    reported = json.loads(out)
    assert code == 1 and reported["ok"] is False and reported["problems"][0]["leaf"] == "w"
    code, _, err = call("verify", tmp_path / "nothing")
    assert code == 2 and err.startswith("ckpt: no checkpoint at")


def test_verify_a_run_of_which_a_step_cannot_be_read(call, steps: Path, monkeypatch):
    refuse(monkeypatch, steps / "2", calls=("open",))
    code, out, _ = call("verify", steps)
    assert code == 1 and "not read: step 2: " in out and "2 of 3 steps ok, 1 not read" in out
    code, out, _ = call("verify", steps, "--json")
    reported = json.loads(out)
    assert code == 1 and not reported["ok"] and [*reported["unread"]] == ["2"]
    assert [row["ok"] for row in reported["steps"]] == [True, True]


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("ls",), ("ls", "a", "--jsn"), ("bench", "run", "x.yaml")]
)
def test_a_wrong_call_is_reported_and_exits_with_2(call, arguments):
    code, _, err = call(*arguments)
    assert code == 2 and err and "Traceback" not in err


def test_help_imports_nothing_heavy(run_python):
    code, loaded = run_python(LOADED, "--help", "+", "--version", "+", "bench", "run", "--help")
    assert code == 0
    assert set(loaded) & {"jax", "numpy", "tensorstore", "orbax", "torch", "yaml"} == set()


def test_without_typer_one_line_says_what_to_install(run_python):
    code = (
        "import json, sys\nsys.modules['typer'] = None\nfrom ckpt_core.cli import main\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    print(json.dumps(str(ended.code)))"
    )
    assert run_python(code) == ("ckpt: the command line needs typer: pip install 'ckpt-core[cli]'")
