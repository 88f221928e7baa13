"""What a user's type checker sees: the right types of results, and errors where a name is misspelt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.test_readme import blocks_of
from tests.support.paths import INTEGRATIONS, ROOT
from tests.support.typed import diagnostics

GOOD = """
from typing import Any, assert_type

import jax

import ckpt_core as ckpt

ckpt.save("runs/tree", {"w": 1}, options=ckpt.Options(compression="zstd"))
tree: Any = ckpt.load("runs/tree")
abstract = {"w": jax.ShapeDtypeStruct((3,), "float32"), "step": 0}
assert_type(ckpt.load("runs/tree", abstract), dict[str, Any])  # arrays, where the target has descriptions
assert_type(ckpt.load("runs/tree", [abstract]), list[Any])
some = ckpt.load("runs/tree", only=lambda path, leaf: path.startswith("params/") and not leaf.shape)
restored = ckpt.restore("runs/tree", model=tree)
assert_type(restored, ckpt.Restored)
assert_type(restored.step, int | None)
assert_type(restored.report.loaded, tuple[str, ...])
with ckpt.Checkpointer("runs/first", save_policy=ckpt.when.every_steps(10)) as checkpointer:
    newest = checkpointer.restore_latest(model=tree)
    if newest is not None:
        assert_type(newest.step, int)
        print(newest.step + 1)
    assert_type(checkpointer.restore(3, model=tree).step, int)
    assert_type(checkpointer.save(3, model=tree, metrics={"loss": 1.0}), bool)
    assert_type(checkpointer.all_steps(), list[int])
assert_type(ckpt.inspect("runs/tree").items["state"].leaves[0].shape, tuple[int, ...])
assert_type(ckpt.convert.export_npz("runs/tree", "x.npz"), list[str])
pending = ckpt.save_async("runs/async", tree)
pending.result(timeout_secs=60)
"""
BAD = """
import ckpt_core as ckpt

ckpt.svae("runs/tree", 1)
ckpt.save("runs/tree", 1, overwrite="yes")
ckpt.Options(compresion="zstd")
ckpt.Checkpointer("runs", max_to_kepp=3)
ckpt.load("runs/tree").x
ckpt.restore("runs/tree", model=1).stpe.bit_length
ckpt.inspect("runs/tree").itms
ckpt.when.every_step(3)
"""


def checked(folder: Path, text: str) -> list[dict[str, object]]:
    """Pyright's errors in a script that uses the installed packages, as a user has them."""
    settings = {
        "typeCheckingMode": "strict",
        "extraPaths": [str(ROOT), *(str(path) for path in INTEGRATIONS.iterdir() if path.is_dir())],
        "reportMissingTypeStubs": False,
    }
    found = diagnostics(folder, text, settings)
    return [one for one in found if one["severity"] == "error"]


def test_right_calls_have_their_types(tmp_path: Path) -> None:
    assert checked(tmp_path, GOOD) == []


def test_the_readmes_script_has_no_error(tmp_path: Path) -> None:
    """As a user's editor shows it, and as mypy says it where that is installed."""
    code = blocks_of((ROOT / "README.md").read_text())[0][1]
    settings = {"extraPaths": [str(ROOT)]}
    assert [
        one for one in diagnostics(tmp_path, code, settings) if one["severity"] == "error"
    ] == []


def test_nor_has_it_for_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(blocks_of((ROOT / "README.md").read_text())[0][1])
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--check-untyped-defs", script],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_misspelt_names_are_errors(tmp_path: Path) -> None:
    lines = {one["range"]["start"]["line"] for one in checked(tmp_path, BAD)}  # type: ignore[index]
    wrong = {n for n, line in enumerate(BAD.splitlines()) if line and "import" not in line}
    unknown = {
        n for n, line in enumerate(BAD.splitlines()) if ".load(" in line
    }  # Any has all names
    # an item may have any name, and is an attribute: ckpt cannot tell it from a misspelt one
    items = {n for n, line in enumerate(BAD.splitlines()) if ".stpe" in line}
    assert lines >= wrong - unknown - items


def test_every_package_says_that_it_is_typed() -> None:
    packages = [ROOT / "ckpt_core", *INTEGRATIONS.glob("*/ckpt_*")]
    assert len(packages) == 6 and all((package / "py.typed").exists() for package in packages)
