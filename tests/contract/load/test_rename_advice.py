"""What a mismatch says of ``rename=``: entries that fit nothing, whatever else fits, and those that would fit."""

import ast
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ckpt_core as ckpt
from ckpt_core.testing import assert_same

BLOCKS: dict[str, Any] = {"blocks": {"w": jnp.ones(2)}, "none": None, "empty": {}}
LAYERS: dict[str, Any] = {"layers": {"w": jnp.ones(2)}, "none": None, "empty": {}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ckpt.save(tmp_path / "one", BLOCKS)
    return tmp_path / "one"


def test_a_misspelled_entry_is_named_where_other_things_differ(saved):
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
def test_one_that_fits_nothing_is_refused_by_itself(saved, like, rename, path, nearest):
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
def test_what_fits_anything_is_no_mistake(saved, rename):
    assert ckpt.load(saved, BLOCKS, rename=rename)["blocks"]["w"].shape == (2,)


def test_an_entry_needs_to_fit_in_one_item_only(tmp_path):
    ckpt.save(tmp_path / "one", model=BLOCKS, other={"x": 1})
    found = ckpt.restore(
        tmp_path / "one", model=LAYERS, other={"x": 0}, rename={"blocks": "layers"}
    )
    assert found["other"] == {"x": 1} and "layers" in found["model"]
    found = ckpt.restore(tmp_path / "one", other={"x": 0}, rename={"blocks": "layers"})
    assert found["other"] == {"x": 1}
    with pytest.raises(ckpt.StructureMismatch, match="nearest name: blocks"):
        ckpt.restore(tmp_path / "one", model=BLOCKS, other={"x": 0}, rename={"bloks": "layers"})


def proposal(path: Path, like: Any) -> dict[str, str] | None:
    with pytest.raises(ckpt.StructureMismatch) as refused:
        ckpt.load(path, like)
    found = re.search(r"such as rename=(\{.*?\})", str(refused.value))
    return found and ast.literal_eval(found[1])


def zeros(leaf: Any) -> Any:
    return jnp.zeros_like(leaf)


def layer(size: int) -> dict[str, Any]:
    return {"kernel": jnp.full((size, size), size), "bias": jnp.ones(size)}


@pytest.mark.parametrize("abstract", [False, True])
def test_what_would_fit_is_written_out(tmp_path, abstract):
    """From old to new; moments of an optimizer have their own entries."""
    saved = {"l1": layer(2), "l2": layer(3), "opt": [{"mu": {"l1": layer(2)}}]}
    wanted = {"fc1": layer(2), "l2": layer(3), "opt": [{"mu": {"fc1": layer(2)}}]}
    ckpt.save(tmp_path / "a", saved)
    like = jax.eval_shape(lambda: wanted) if abstract else wanted
    rename = proposal(tmp_path / "a", like)
    assert rename == {"l1": "fc1", "opt/0/mu/l1": "opt/0/mu/fc1"}
    assert_same(ckpt.load(tmp_path / "a", jax.tree.map(zeros, wanted), rename=rename), wanted)


def test_nothing_is_written_out_where_shapes_differ_or_much_does(tmp_path):
    ckpt.save(tmp_path / "a", {"l1": layer(2)})
    assert proposal(tmp_path / "a", {"fc1": layer(4)}) is None
    ckpt.save(tmp_path / "b", {f"l{place}": {"w": jnp.ones(place + 1)} for place in range(9)})
    assert (
        proposal(tmp_path / "b", {f"m{place}": {"w": jnp.ones(place + 1)} for place in range(9)})
        is None
    )


V, W = jnp.ones(3), jnp.ones(2)


@pytest.mark.parametrize(
    ("saved", "wanted", "rename"),
    [
        ({"enc": {"w": W, "v": V}}, {"enc": {"v": V}, "encoder": {"w": W}}, {"enc/w": "encoder/w"}),
        (
            {"layer": {"w": W, "v": V}},
            {"layer1": {"w": W}, "layer2": {"v": V}},
            {"layer/w": "layer1/w", "layer/v": "layer2/v"},
        ),
        ({"m": {"wei": W}, "o": {"wei": W}}, {"m": {"weig": W}, "o": {"wei": W}}, None),
        ({"m": {"wei": W}, "o": {"wei": W}}, {"m": {"weight": W}, "o": {"weigh": W}}, None),
    ],
    ids=["other leaf below", "two ends", "item that stays", "two items"],
)
def test_what_is_written_out_moves_no_other_leaf(tmp_path, saved, wanted, rename):
    if "m" in saved:
        ckpt.save(tmp_path / "a", **saved)
    else:
        ckpt.save(tmp_path / "a", saved)
    assert proposal(tmp_path / "a", wanted) == rename
    if rename is not None:
        loaded = ckpt.load(tmp_path / "a", jax.tree.map(zeros, wanted), rename=rename)
        assert_same(loaded, wanted)


def test_nothing_is_written_out_beside_entries_of_the_caller(tmp_path):
    ckpt.save(tmp_path / "a", {"alpha": V, "kern": W})
    with pytest.raises(ckpt.StructureMismatch) as refused:
        ckpt.load(
            tmp_path / "a", {"beta": V, "kernel": W}, rename={"alpha": "beta", "kernn": "kernel"}
        )
    assert "such as rename=" not in str(refused.value)


def test_the_nearest_name_ends_alike_or_has_the_same_shape(tmp_path):
    ckpt.save(tmp_path / "a", {"opt_state": [{"count": jnp.zeros((), int), "mu": jnp.ones(3)}]})
    with pytest.raises(ckpt.StructureMismatch) as refused:
        ckpt.load(tmp_path / "a", {"opt_state": [{"trace": jnp.ones(3), "out": jnp.ones(2)}]})
    nearest = {entry.path: entry.nearest for entry in refused.value.mismatches}
    assert nearest["opt_state/0/count"] is None and nearest["opt_state/0/out"] is None
    assert nearest["opt_state/0/trace"] == "opt_state/0/mu"


def test_a_shape_says_what_to_do(tmp_path):
    ckpt.save(tmp_path / "a", {"w": jnp.ones(3), "b": jnp.ones(2)})
    like = {"w": jnp.zeros(4), "b": jnp.zeros(2)}
    with pytest.raises(ckpt.StructureMismatch, match="load what fits with only= and convert"):
        ckpt.load(tmp_path / "a", like)
    assert ckpt.load(tmp_path / "a", like, only="b")["b"].tolist() == [1, 1]
    assert ckpt.load(tmp_path / "a", only="w")["w"].shape == (3,)
