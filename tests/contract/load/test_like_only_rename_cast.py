"""Loads into a target: what must fit, what may be cast, renamed, left out."""

import copy
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.trees import QUICK, Moments, abstract, assert_same, numbers, sharded


def model():
    return {
        "params": {"dense": {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}, "out": jnp.full(2, 5.0)},
        "opt": [Moments(jnp.ones(3), jnp.ones(3)), 7],
        "note": "text",
        "host": np.arange(3),
    }


@pytest.fixture
def saved(tmp_path):
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
def test_kinds_of_targets(saved, kind):
    assert_same(ckpt.load(saved, kind(model())), model())


def test_the_target_decides_between_numpy_and_jax(saved):
    like = model()
    like["host"] = jnp.zeros(3, int)
    like["params"]["out"] = np.zeros(2, np.float32)
    got = ckpt.load(saved, like, cast=True)
    assert isinstance(got["host"], jax.Array)
    assert isinstance(got["params"]["out"], np.ndarray)
    np.testing.assert_array_equal(got["params"]["out"], [5, 5])


def test_without_a_target_the_devices_keep_their_order(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("x", "y"))
    place = jax.sharding.NamedSharding(mesh, jax.P("x", "y"))
    ckpt.save(tmp_path / "c", {"a": jax.device_put(np.arange(32.0).reshape(8, 4), place)})
    assert ckpt.load(tmp_path / "c")["a"].sharding == place


def test_the_target_is_not_changed(saved):
    like = zeros_like(model())
    before = copy.copy(like["host"])
    got = ckpt.load(saved, like)
    assert_same(like["host"], before)
    assert got["host"] is not like["host"]


def test_every_mismatch_is_named(saved):
    like = model()
    like["params"]["dense"]["w"] = jnp.ones((4, 4))
    like["params"]["dense"]["bias"] = like["params"]["dense"].pop("b")
    like["params"]["out"] = jnp.ones(2, jnp.int32)
    like["opt"][1] = "seven"
    like["new"] = jnp.ones(1)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.load(saved, like)
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


def test_containers_of_another_kind(saved):
    """A list is not a dict of positions; a NamedTuple's fields are not positions."""
    like = model()
    like["opt"] = {"0": like["opt"][0], "1": like["opt"][1]}
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(saved, like)
    like = model()
    like["opt"][0] = tuple(like["opt"][0])
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(saved, like)


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


def test_nothing_is_read_on_a_mismatch(saved, monkeypatch):
    """The whole tree is checked before any data: also with the data gone it is the mismatch."""
    for path in (saved / "state").rglob("d/*"):
        path.unlink()
    like = model()
    like["params"]["out"] = jnp.ones(3)
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(saved, like)


def test_missing_leaves_can_be_kept(saved):
    like = model() | {"new": jnp.full(2, 9.0), "plain": 3}
    got = ckpt.load(saved, like, missing="keep")
    assert_same(got, model() | {"new": jnp.full(2, 9.0), "plain": 3})
    abstract = model() | {"new": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(ckpt.CheckpointError, match="new"):
        ckpt.load(saved, abstract, missing="keep")


def test_settings_have_no_typos(saved):
    with pytest.raises((ValueError, TypeError)):
        ckpt.load(saved, model(), missing="ignore it")
    with pytest.raises((ValueError, TypeError)):
        ckpt.load(saved, model(), unexpected="whatever")


def test_rename_by_function(saved):
    like = model()
    like["params"]["layer"] = like["params"].pop("dense")
    got = ckpt.load(saved, like, rename=lambda path: path.replace("params/dense/", "params/layer/"))
    assert_same(got["params"]["layer"], model()["params"]["dense"])


def test_rename_onto_another_leaf_is_an_error(saved):
    with pytest.raises((ckpt.CheckpointError, ValueError)):
        ckpt.load(saved, rename=lambda path: "same")


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
def test_only(saved, pattern, paths):
    got = ckpt.load(saved, only=pattern)
    assert {path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(got)} == paths
    like = zeros_like(model())
    got = ckpt.load(saved, like, only=pattern)
    assert jax.tree.structure(got) == jax.tree.structure(like)
    want = jax.tree_util.tree_map_with_path(
        lambda keys, saved, kept: saved if path_of(keys) in paths else kept, model(), like
    )
    assert_same(got, want)


def path_of(keys):
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def test_as_numpy(saved):
    got = ckpt.load(saved, as_numpy=True)
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


def test_inspect(saved):
    info = ckpt.inspect(saved)
    leaves = {leaf.path: leaf for leaf in info.items["state"].leaves}
    assert leaves["params/dense/w"].shape == (4, 3)
    assert np.dtype(leaves["params/dense/w"].dtype) == np.float32
    assert leaves["params/dense/w"].bytes == 48
    assert leaves["opt/0/mu"].kind
    assert set(leaves) == {
        "params/dense/w", "params/dense/b", "params/out", "opt/0/mu", "opt/0/nu", "opt/1",
        "note", "host",
    }  # fmt: skip


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
    class Counter:
        def __init__(self, value):
            self.value = value

        def get_state(self):
            return {"value": jnp.int32(self.value), "list": [1, 2]}

        def set_state(self, state):
            self.value = int(state["value"])

    ckpt.save(tmp_path / "c", {"counter": Counter(5), "w": jnp.ones(2)}, options=QUICK)
    counter = Counter(0)
    restored = ckpt.restore(tmp_path / "c", state={"counter": counter, "w": jnp.zeros(2)})
    assert counter.value == 5
    assert restored["state"]["counter"] is counter
    got = ckpt.load(tmp_path / "c")
    assert_same(got["counter"], {"value": jnp.int32(5), "list": [1, 2]})
