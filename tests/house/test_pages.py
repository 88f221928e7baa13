"""The pages that promise to be complete are: every error, every promise, and tests that are there."""

import inspect
import re

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.paths import ROOT

DOCS = ROOT / "docs"


def test_every_public_error_has_an_entry():
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


def test_every_kind_of_mismatch_is_told():
    text = (DOCS / "troubleshooting.md").read_text()
    kinds = re.findall(r"``(\w+)``", (ckpt.Mismatch.__doc__ or "").partition("saved:")[0])
    assert len(kinds) >= 8
    for kind in kinds:
        assert f"`{kind}`" in text, kind


def test_what_the_page_has_of_errors_is_so(tmp_path):
    one, state = tmp_path / "one", {"params": {"w": np.ones((4, 8))}, "step": 7}
    ckpt.save(one, state)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        ckpt.save(one, state)
    with pytest.raises(ckpt.StructureMismatch) as differs:
        ckpt.load(one, {"params": {"w": np.ones((4, 9))}, "stp": 0})
    assert {at.kind for at in differs.value.mismatches} == {"missing", "unexpected", "shape"}
    with pytest.raises(ckpt.UnsupportedLeaf) as refused:
        ckpt.save(tmp_path / "two", {"run": {"lock": object()}})
    assert (refused.value.leaf, refused.value.type_name) == ("run/lock", "object")


def test_the_page_of_the_promises_names_folders_of_tests_for_each():
    text = (DOCS / "guide" / "promises.md").read_text()
    promised = re.split(
        r"^\d\. \*\*", text.partition("## What was never run")[0], flags=re.MULTILINE
    )[1:]
    assert len(promised) == 9
    folders = {one.name for one in ROOT.glob("tests/*/*") if one.is_dir()}
    for one in promised:
        assert set(re.findall(r"<code>(\w+)</code>", one)) & folders, one
    named = re.findall(r"<code>(\w+)</code>", text) + re.findall(
        r"`([a-z_]+)`", text.partition("Beyond these")[2].partition("## ")[0]
    )
    assert len(named) > 30 and set(named) <= folders
