"""The moments of ``tests.support.seams``: a real save passes each, each can fail, and nobody else patches them."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import seams
from tests.support.paths import ROOT

OF_ONE: list[seams.Point] = ["write", "record", "commit"]


@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_a_save_passes_each_moment_once_and_in_order(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "a") if kind == "local" else f"memory://{tmp_path.name}/a"
    passed: list[str] = []
    for point in OF_ONE:
        for when in ("before", "after"):
            act: Any = {when: lambda *_, name=f"{when} {point}": passed.append(name)}
            seams.at(monkeypatch, point, where=seams.below(place.rpartition("/")[0]), **act)
    ckpt.save(place, {"w": np.ones(3)})
    assert passed == [f"{when} {point}" for point in OF_ONE for when in ("before", "after")]


@pytest.mark.parametrize("point", OF_ONE)
def test_each_moment_can_fail(
    point: seams.Point, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.at(monkeypatch, point, before=seams.fail(), where=seams.below(tmp_path / "a"), nth=2)
    with ckpt.Checkpointer(tmp_path / "a", asynchronous=False) as checkpointer:
        assert checkpointer.save(0, {"n": 0})
        ckpt.save(tmp_path / "b", {"n": 0})  # it is elsewhere, and does not count
        with pytest.raises(OSError, match="No space left"):
            checkpointer.save(1, {"n": 1})
        assert checkpointer.save(2, {"n": 2})
        assert checkpointer.all_steps() == [0, 2]
    monkeypatch.undo()
    ckpt.save(tmp_path / "a" / "3", {"n": 3})


def test_a_gate_holds_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = seams.Gate()
    seams.at(monkeypatch, "commit", before=gate)
    saving = threading.Thread(target=ckpt.save, args=(tmp_path / "a", {"n": 1}))
    saving.start()
    assert gate.entered.wait(60) and not (tmp_path / "a").exists()
    gate.go.set()
    saving.join(60)
    assert ckpt.load(tmp_path / "a") == {"n": 1}


def test_an_unknown_moment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="close"):
        seams.at(monkeypatch, "close")  # pyright: ignore[reportArgumentType]


def test_nobody_else_patches_them() -> None:
    methods = [(owner.__name__, name) for pairs in seams.POINTS.values() for owner, name in pairs]
    methods += [("write", "dump_record"), ("Round", "all")]  # the same moments
    patched = "|".join(rf'\b{owner}(\.{name}( = |",)|,\s*"{name}")' for owner, name in methods)
    found = {
        file.relative_to(ROOT / "tests").as_posix()
        for file in (ROOT / "tests").rglob("*.py")
        if re.search(patched, file.read_text())
    }
    assert found == {"support/seams.py"}, "use tests.support.seams"
