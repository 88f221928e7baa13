"""Entries of ``rename=`` that fit nothing are told, whatever else fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ckpt_core as ckpt

BLOCKS: dict[str, Any] = {"blocks": {"w": jnp.ones(2)}, "none": None, "empty": {}}
LAYERS: dict[str, Any] = {"layers": {"w": jnp.ones(2)}, "none": None, "empty": {}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ckpt.save(tmp_path / "one", BLOCKS)
    return tmp_path / "one"


def test_a_misspelled_entry_is_named_where_other_things_differ(saved: Path):
    with pytest.raises(ckpt.StructureMismatch) as refused:
        ckpt.load(saved, LAYERS, rename={"bloks": "layers"})
    assert {entry.kind for entry in refused.value.mismatches} == {"missing", "unexpected"}
    assert "'bloks' (nearest name: blocks)" in str(refused.value)
    assert "rename= maps saved paths" in str(refused.value)


@pytest.mark.parametrize("like", [None, BLOCKS])
@pytest.mark.parametrize(
    ("rename", "path", "nearest"),
    [
        ({"bloks": "layers"}, "bloks", "blocks"),
        ({"blocks/v": "w"}, "blocks/v", "blocks/w"),
        ({"blocks/": "layers"}, "blocks/", "blocks"),
        ({"lock": "x", "blocks/w": "blocks/w"}, "lock", "blocks"),
        ({"": "x"}, "", None),
    ],
)
def test_one_that_fits_nothing_is_refused_by_itself(
    saved: Path, like: Any, rename: dict[str, str], path: str, nearest: str | None
):
    with pytest.raises(ckpt.StructureMismatch) as refused:
        ckpt.load(saved, like, rename=rename)
    (entry,) = refused.value.mismatches
    assert (entry.path, entry.kind, entry.nearest) == (path, "rename", nearest)
    assert "rename=" in str(refused.value)


@pytest.mark.parametrize(
    "rename",
    [
        {"blocks": "blocks"},
        {"blocks/w": "blocks/w"},
        {"none": "none"},
        {"empty": "empty"},
        {"old": "blocks"},  # a program that also reads what was saved under an old name
        lambda path: path,
    ],
)
def test_what_fits_anything_is_no_mistake(saved: Path, rename: Any):
    assert ckpt.load(saved, BLOCKS, rename=rename)["blocks"]["w"].shape == (2,)


def test_an_entry_needs_to_fit_in_one_item_only(tmp_path: Path):
    ckpt.save(tmp_path / "one", model=BLOCKS, other={"x": 1})
    found = ckpt.restore(
        tmp_path / "one", model=LAYERS, other={"x": 0}, rename={"blocks": "layers"}
    )
    assert found["other"] == {"x": 1} and "layers" in found["model"]
    found = ckpt.restore(tmp_path / "one", other={"x": 0}, rename={"blocks": "layers"})
    assert found["other"] == {"x": 1}
    with pytest.raises(ckpt.StructureMismatch, match="nearest name: blocks"):
        ckpt.restore(tmp_path / "one", model=BLOCKS, other={"x": 0}, rename={"bloks": "layers"})
