"""Patterns of only= and entries of rename=: what they fit; and loads into a target: what must fit, what may be cast or left out."""

import ast
import copy
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import testing
from tests.support.own import Own
from tests.support.trees import QUICK, Moments, abstract, assert_same, numbers, sharded

STATE = {"params": {"w": np.ones(3, np.float32), "b": np.zeros(2, np.float32)}, "step": 7}


@pytest.fixture
def path(tmp_path):
    ckpt.save(tmp_path / "one", STATE)
    return tmp_path / "one"


@pytest.mark.parametrize(
    ("only", "advice"),
    [
        (["params", "step"], r"'params' matches no leaf.*'params/\*\*' takes all leaves below"),
        (["params/", "step"], r"'params/\*\*'"),
        ("params", r"only='params' matches no leaf.*'params/\*\*'"),
        (["parms/**", "step"], r"'parms/\*\*' matches no leaf"),
        (("params/w", "stepp"), "'stepp' matches no leaf.*nearest name is 'step'"),
        ([], "matches no leaf"),
    ],
)
@pytest.mark.parametrize("with_target", [False, True])
def test_one_idle_pattern_among_several_is_refused(path, only, advice, with_target):
    target = (STATE,) if with_target else ()
    with pytest.raises(ckpt.CheckpointNotFound, match=advice):
        ckpt.load(path, *target, only=only)


def test_patterns_that_all_match(path, tmp_path):
    assert ckpt.load(path, only=["params/**", "step"])["step"] == 7
    assert ckpt.load(path, only=["state/step", "**/w"]).keys() == {"params", "step"}
    ckpt.save(tmp_path / "root", np.arange(3))
    assert ckpt.load(tmp_path / "root", only=["(root)"]).shape == (3,)


def test_a_pattern_may_name_what_only_the_target_has(path):
    like = {**STATE, "ema": 3}
    loaded = ckpt.load(path, like, only=["ema", "step"], missing="keep")
    assert (loaded["ema"], loaded["step"]) == (3, 7)


def test_patterns_of_several_items(tmp_path):
    ckpt.save(tmp_path / "two", model={"w": jnp.ones(2)}, opt={"m": jnp.ones(2)}, note=ckpt.Json(1))
    both = ["model/w", "opt/m"]
    assert ckpt.load(tmp_path / "two", only=[*both, "note"]).keys() == {"model", "opt", "note"}
    with pytest.raises(ckpt.CheckpointNotFound, match="'opt' matches no leaf"):
        ckpt.load(tmp_path / "two", only=["model/w", "opt"])


@pytest.mark.parametrize("make", [iter, set, lambda texts: (text for text in texts)])
def test_a_generator_is_read_once_for_all_items(tmp_path, make):
    tree = {"w": np.ones(2), "v": np.ones(2)}
    ckpt.save(tmp_path / "two", a=tree, b=tree)
    like = {"a": {"w": np.zeros(2)}, "b": {"w": np.zeros(2)}}
    for call in (ckpt.load, lambda *args, **more: ckpt.load_async(*args, **more).result()):
        loaded = call(tmp_path / "two", only=make(["w", "**/w"]))
        assert [tuple(loaded[name]) for name in ("a", "b")] == [("w",), ("w",)]
        loaded = call(tmp_path / "two", like, only=make(["w"]))
        assert [loaded[name]["w"].tolist() for name in ("a", "b")] == [[1, 1], [1, 1]]


def test_patterns_are_text(path):
    with pytest.raises(TypeError, match="patterns are text"):
        ckpt.load(path, only=[b"step"])


def test_a_pattern_may_name_an_item_that_is_not_restored(tmp_path):
    ckpt.save(tmp_path / "two", model={"w": np.ones(2)}, fit={"step": 3}, note=ckpt.Json(1))
    only = ["model/w", "fit/**", "note/**"]
    assert ckpt.restore(tmp_path / "two", model={"w": np.zeros(2)}, only=only)["model"]["w"][0] == 1
    with pytest.raises(ckpt.CheckpointNotFound, match="matches no leaf"):
        ckpt.restore(tmp_path / "two", model={"w": np.zeros(2)}, only=only[1:])
    with pytest.raises(ckpt.CheckpointNotFound, match="'fitt/"):
        ckpt.restore(tmp_path / "two", model={"w": np.zeros(2)}, only=["model/w", "fitt/**"])


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("w/**", {"n": [0, 0], "m": {"k": 0, "name": "before"}}),
        (["w/**", "e/n"], {"n": [1, 1], "m": {"k": 0, "name": "before"}}),
        ("e/m/**", {"n": [0, 0], "m": {"k": 1, "name": "saved"}}),
        ("e/m/k", {"n": [0, 0], "m": {"k": 1, "name": "before"}}),
        ("e/**", {"n": [1, 1], "m": {"k": 1, "name": "saved"}}),
    ],
)
@pytest.mark.parametrize("as_jax", [False, True])
def test_an_object_keeps_what_is_not_selected(tmp_path, only, expected, as_jax):
    full = jnp.full if as_jax else np.full
    saved = Own(n=full(2, 1), m={"k": 1, "name": "saved"})
    ckpt.save(tmp_path / "c", items={"e": saved, "w": {"a": np.ones(3)}})
    target = Own(n=full(2, 0), m={"k": 0, "name": "before"})
    tree: Any = {"a": np.zeros(3)}
    found = ckpt.restore(tmp_path / "c", items={"e": target, "w": tree}, only=only)
    assert target.n.tolist() == expected["n"]
    assert target.m == expected["m"]
    assert isinstance(target.n, jax.Array if as_jax else np.ndarray)
    assert found["e"] is target
    assert found["w"]["a"].tolist() == ([1.0] * 3 if "w/**" in only else [0.0] * 3)


def test_an_object_without_what_is_left_out_is_not_changed(tmp_path):
    ckpt.save(tmp_path / "c", items={"e": Own(n=1, m={"k": 1})})
    target = Own(n=0)
    with pytest.raises(ckpt.StructureMismatch, match=r"m/k.*not in the target"):
        ckpt.restore(tmp_path / "c", items={"e": target}, only="e/n")
    assert vars(target) == {"n": 0}
    ckpt.restore(tmp_path / "c", items={"e": target}, only="e/**")
    assert vars(target) == {"n": 1, "m": {"k": 1}}


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
    testing.assert_same(
        ckpt.load(tmp_path / "a", jax.tree.map(zeros, wanted), rename=rename), wanted
    )


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
        testing.assert_same(loaded, wanted)


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


def model():
    return {
        "params": {"dense": {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}, "out": jnp.full(2, 5.0)},
        "opt": [Moments(jnp.ones(3), jnp.ones(3)), 7],
        "note": "text",
        "host": np.arange(3),
    }


@pytest.fixture
def stored(tmp_path):
    ckpt.save(tmp_path / "c", model(), options=QUICK)
    return tmp_path / "c"


def zeros_like(tree):
    """A target of the same kinds of leaves with other values."""
    return jax.tree.map(
        lambda x: (
            jnp.zeros_like(x) if isinstance(x, jax.Array)
            else np.zeros_like(x) if isinstance(x, np.ndarray)
            else type(x)()
        ),
        tree,
    )  # fmt: skip


@pytest.mark.parametrize(
    "kind", [zeros_like, abstract, functools.partial(abstract, sharding=False)]
)
def test_kinds_of_targets(stored, kind):
    assert_same(ckpt.load(stored, kind(model())), model())


def test_the_target_decides_between_numpy_and_jax(stored):
    like = model()
    like["host"] = jnp.zeros(3, int)
    like["params"]["out"] = np.zeros(2, np.float32)
    got = ckpt.load(stored, like, cast=True)
    assert isinstance(got["host"], jax.Array)
    assert isinstance(got["params"]["out"], np.ndarray)
    np.testing.assert_array_equal(got["params"]["out"], [5, 5])


def test_the_target_is_not_changed(stored):
    like = zeros_like(model())
    before = copy.copy(like["host"])
    got = ckpt.load(stored, like)
    assert_same(like["host"], before)
    assert got["host"] is not like["host"]


def test_every_mismatch_is_named(stored):
    like = model()
    like["params"]["dense"]["w"] = jnp.ones((4, 4))
    like["params"]["dense"]["bias"] = like["params"]["dense"].pop("b")
    like["params"]["out"] = jnp.ones(2, jnp.int32)
    like["opt"][1] = "seven"
    like["new"] = jnp.ones(1)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.load(stored, like)
    found = {(mismatch.path, mismatch.kind) for mismatch in caught.value.mismatches}
    assert found == {
        ("params/dense/w", "shape"),
        ("params/dense/bias", "missing"),
        ("params/dense/b", "unexpected"),
        ("params/out", "dtype"),
        ("opt/1", "kind"),
        ("new", "missing"),
    }
    by_path = {mismatch.path: mismatch for mismatch in caught.value.mismatches}
    assert by_path["params/dense/bias"].nearest == "params/dense/b"
    assert by_path["params/dense/b"].nearest == "params/dense/bias"
    shape = by_path["params/dense/w"]
    assert "4,3" in shape.saved.replace(" ", "")
    assert "4,4" in shape.wanted.replace(" ", "")
    for path, _ in found:
        assert path in str(caught.value)


def test_containers_of_another_kind(stored):
    """A list is not a dict of positions; a NamedTuple's fields are not positions."""
    like = model()
    like["opt"] = {"0": like["opt"][0], "1": like["opt"][1]}
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(stored, like)
    like = model()
    like["opt"][0] = tuple(like["opt"][0])
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(stored, like)


def test_int_and_text_keys_differ(tmp_path):
    ckpt.save(tmp_path / "c", {1: np.ones(1)})
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(tmp_path / "c", {"1": np.ones(1)})


def test_a_shape_of_the_same_size_is_another_shape(tmp_path):
    ckpt.save(tmp_path / "c", {"a": jnp.ones((2, 3)), "s": jnp.ones(())})
    for like in (
        {"a": jnp.ones((3, 2)), "s": jnp.ones(())},
        {"a": jnp.ones((2, 3)), "s": jnp.ones(1)},
    ):
        with pytest.raises(ckpt.StructureMismatch):
            ckpt.load(tmp_path / "c", like)


def test_nothing_is_read_on_a_mismatch(stored, monkeypatch):
    """The whole tree is checked before any data: also with the data gone it is the mismatch."""
    for path in (stored / "state").rglob("d/*"):
        path.unlink()
    like = model()
    like["params"]["out"] = jnp.ones(3)
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(stored, like)


def test_settings_have_no_typos(stored):
    with pytest.raises((ValueError, TypeError)):
        ckpt.load(stored, model(), missing="ignore it")
    with pytest.raises((ValueError, TypeError)):
        ckpt.load(stored, model(), unexpected="whatever")


def test_rename_by_function(stored):
    like = model()
    like["params"]["layer"] = like["params"].pop("dense")
    got = ckpt.load(
        stored, like, rename=lambda path: path.replace("params/dense/", "params/layer/")
    )
    assert_same(got["params"]["layer"], model()["params"]["dense"])


def test_rename_onto_another_leaf_is_an_error(stored):
    with pytest.raises((ckpt.CheckpointError, ValueError)):
        ckpt.load(stored, rename=lambda path: "same")


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("params/**", {"params/dense/w", "params/dense/b", "params/out"}),
        ("params/*", {"params/out"}),
        ("**/b", {"params/dense/b"}),
        ("note", {"note"}),
        (["note", "host"], {"note", "host"}),
        ("opt/0/*", {"opt/0/mu", "opt/0/nu"}),
        (lambda path, _: path.endswith("w"), {"params/dense/w"}),
        (lambda _, leaf: leaf.shape == (3,), {"params/dense/b", "opt/0/mu", "opt/0/nu", "host"}),
    ],
)
def test_only(stored, pattern, paths):
    got = ckpt.load(stored, only=pattern)
    assert {path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(got)} == paths
    like = zeros_like(model())
    got = ckpt.load(stored, like, only=pattern)
    assert jax.tree.structure(got) == jax.tree.structure(like)
    want = jax.tree_util.tree_map_with_path(
        lambda keys, stored, kept: stored if path_of(keys) in paths else kept, model(), like
    )
    assert_same(got, want)


def path_of(keys):
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def test_as_numpy(stored):
    got = ckpt.load(stored, as_numpy=True)
    assert isinstance(got["params"]["out"], np.ndarray)
    np.testing.assert_array_equal(got["params"]["out"], [5, 5])
    assert got["opt"][1] == 7
    assert isinstance(got["opt"][0], Moments)


def test_as_numpy_of_odd_dtypes(tmp_path):
    tree = {"b": jnp.ones(3, jnp.bfloat16), "i": jnp.arange(3, dtype=jnp.int4), "s": np.float32(1)}
    ckpt.save(tmp_path / "c", tree)
    got = ckpt.load(tmp_path / "c", as_numpy=True)
    assert got["b"].dtype == ml_dtypes.bfloat16
    assert got["i"].dtype == ml_dtypes.int4
    large = {"big": sharded(numbers((1200, 312)), "4x2", "swapped")}
    ckpt.save(tmp_path / "d", large)
    np.testing.assert_array_equal(ckpt.load(tmp_path / "d", as_numpy=True)["big"], large["big"])


def test_restore_gives_immutable_trees_back(tmp_path):
    ckpt.save(tmp_path / "c", state=model(), extra={"x": np.ones(2)}, metadata={"lr": 0.5})
    restored = ckpt.restore(tmp_path / "c", state=zeros_like(model()), extra={"x": np.zeros(2)})
    assert restored
    assert_same(restored["state"], model())
    assert_same(restored["extra"], {"x": np.ones(2)})
    assert restored.step is None
    assert restored.metadata == {"lr": 0.5}
    assert restored.report.loaded
    assert not restored.report.missing


def test_a_stateful_object_inside_a_tree(tmp_path):
    ckpt.save(tmp_path / "c", {"counter": Own(value=jnp.int32(5), list=[1, 2])}, options=QUICK)
    assert_same(ckpt.load(tmp_path / "c")["counter"], {"value": jnp.int32(5), "list": [1, 2]})
