"""The pages that promise to be complete are: every error, every promise, and tests that are there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.paths import ROOT

DOCS = ROOT / "docs"


def test_every_public_error_has_an_entry() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    entries = dict(re.findall(r"^## `(\w+)`(?: \(`(\w+)`\))?$", text, re.MULTILINE))
    public = {name: getattr(ckpt, name) for name in ckpt.__all__}
    errors = {
        name: value
        for name, value in public.items()
        if inspect.isclass(value) and issubclass(value, ckpt.CheckpointError)
    }
    assert len(errors) >= 9
    assert set(entries) - {"TypeError"} == set(errors)
    for name, builtin in entries.items():
        bases = [base.__name__ for base in getattr(errors.get(name), "__bases__", ())]
        assert not builtin or builtin in bases, name


def test_every_kind_of_mismatch_is_told() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    kinds = re.findall(r"``(\w+)``", (ckpt.Mismatch.__doc__ or "").partition("saved:")[0])
    assert len(kinds) >= 8
    for kind in kinds:
        assert f"`{kind}`" in text, kind


def test_what_the_page_has_of_each_error_is_so(tmp_path: Path) -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    one, run = tmp_path / "one", ckpt.Checkpointer(tmp_path / "run")
    state = {"params": {"w": np.ones((4, 8))}, "step": 7}
    ckpt.save(one, state)
    run.save(0, weights=state)
    run.wait_until_finished()
    run.restore_latest(weights=state)
    calls: dict[str, Callable[[], Any]] = {
        "CheckpointNotFound": lambda: run.load(3),
        "CheckpointExists": lambda: ckpt.save(one, state),
        "StructureMismatch": lambda: ckpt.load(one, {"params": {"w": np.ones((4, 9))}, "stp": 0}),
        "UnsupportedLeaf": lambda: ckpt.save(tmp_path / "two", {"run": {"lock": object()}}),
        "RestoredValueIgnored": lambda: run.save(1, weights=state),
        "TypeError": lambda: ckpt.save(one, model=state, overwite=True),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises(getattr(ckpt, name, TypeError)) as raised:
            call()
        assert f"## `{name}`" in text
        said[name] = raised.value
    assert {one.kind for one in said["StructureMismatch"].mismatches} == {
        "missing",
        "unexpected",
        "shape",
    }
    assert (said["UnsupportedLeaf"].leaf, said["UnsupportedLeaf"].type_name) == (
        "run/lock",
        "object",
    )
    assert said["RestoredValueIgnored"].item == "weights"
    assert "overwrite" in str(said["TypeError"])
    run.close()


def test_the_page_of_the_promises_has_each_and_names_folders_of_tests() -> None:
    text = (DOCS / "promises.md").read_text()
    promised = re.findall(r"^\d\. \*\*", (DOCS / "guide" / "promises.md").read_text(), re.MULTILINE)
    assert len(re.findall(r"^## \d\. ", text, re.MULTILINE)) == len(promised)
    folders = {one.name for one in ROOT.glob("tests/*/*") if one.is_dir()}
    assert set(re.findall(r"`([a-z_]+)`", text)) <= folders
