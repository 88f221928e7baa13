"""The moments of ``tests.support.seams``: a real save passes each, each can fail, and nobody else patches them."""

import re
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import seams
from tests.support.paths import ROOT

OF_ONE: list[seams.Point] = ["write", "record", "commit"]


@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_a_save_passes_each_moment_once_and_in_order(kind, tmp_path, monkeypatch):
    place = str(tmp_path / "a") if kind == "local" else f"memory://{tmp_path.name}/a"
    passed: list[str] = []
    for point in OF_ONE:
        for when in ("before", "after"):
            act: Any = {when: lambda *_, name=f"{when} {point}": passed.append(name)}
            seams.at(monkeypatch, point, where=seams.below(place.rpartition("/")[0]), **act)
    ckpt.save(place, {"w": np.ones(3)})
    assert passed == [f"{when} {point}" for point in OF_ONE for when in ("before", "after")]


def test_nobody_else_patches_them():
    methods = [(owner.__name__, name) for pairs in seams.POINTS.values() for owner, name in pairs]
    methods += [("write", "dump_record"), ("Round", "all")]  # the same moments
    patched = "|".join(rf'\b{owner}(\.{name}( = |",)|,\s*"{name}")' for owner, name in methods)
    found = {
        file.relative_to(ROOT / "tests").as_posix()
        for file in (ROOT / "tests").rglob("*.py")
        if re.search(patched, file.read_text())
    }
    assert found == {"support/seams.py"}, "use tests.support.seams"
