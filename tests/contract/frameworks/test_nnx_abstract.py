"""Abstract NNX models: arrays outside of Variables, parts that stay abstract, and states that Flax keys by tuples."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from ckpt_flax_nnx import abstract
from tests.support.meshes import explicit_mesh
from tests.support.nnx_models import same
from tests.support.trees import Moments


class Holder(nnx.Module):
    def __init__(self, held: Any) -> None:
        self.held = nnx.data(held)
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.settings = {"a": jax.ShapeDtypeStruct((7,), jnp.float32)}  # no data


class NoPytree(nnx.Module, pytree=False):
    def __init__(self) -> None:
        self.held = {"a": jnp.arange(3.0)}
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


class Shares(nnx.Module):
    def __init__(self) -> None:
        self.one = Holder({"a": jnp.arange(3.0)})
        self.two = self.one


def weight_norm() -> nnx.Module:
    rngs = nnx.Rngs(0)
    model = nnx.WeightNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs)
    model(jnp.ones((1, 4)))
    return model


def arrays() -> tuple[Any, Any]:
    return jnp.arange(3.0), jnp.ones(2, jnp.int32)


MODELS: dict[str, Callable[[], Any]] = {
    "array": lambda: Holder(arrays()[0]),
    "dict": lambda: Holder({"a": arrays()[0], "b": arrays()[1]}),
    "list": lambda: Holder(list(arrays())),
    "tuple": lambda: Holder(arrays()),
    "named tuple": lambda: Holder(Moments(*arrays())),
    "nested": lambda: Holder({"a": [arrays()[0], {"b": (arrays()[1],)}]}),
    "keyed by tuples": lambda: Holder({("a", 1): arrays()[0]}),
    "with a variable": lambda: Holder({"a": arrays()[0], "v": nnx.Param(jnp.ones(2))}),
    "in a module in a list": lambda: Holder([Holder({"a": arrays()[0]})]),
    "no pytree": NoPytree,
    "shared": Shares,
    "weight norm": weight_norm,
}


def assert_equal(model: Any, made: Any) -> None:
    assert same(values(model), values(made)) and values(made)
    assert nnx.graphdef(model) == nnx.graphdef(made)


def values(obj: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(obj))


@pytest.fixture(params=[False, True])
def mesh(request: pytest.FixtureRequest) -> Any:
    return explicit_mesh((2,), ("model",)) if request.param else None


@pytest.mark.parametrize("name", MODELS)
def test_all_of_an_abstract_model_is_restored(name, mesh, tmp_path):
    make = MODELS[name]
    ckpt.save(tmp_path / "a", model=make())
    model = abstract(make, mesh)
    ckpt.restore(tmp_path / "a", model=model)
    assert_equal(model, make())
    if mesh is not None:
        state = jax.tree.leaves(nnx.state(model))
        assert all(leaf.sharding.device_set == set(mesh.devices.flat) for leaf in state)
    ckpt.save(tmp_path / "b", model=model)
    paths = [
        [leaf.path for leaf in ckpt.inspect(tmp_path / name).items["model"].leaves] for name in "ab"
    ]
    assert paths[0] == paths[1]


@pytest.mark.parametrize("name", ["dict", "list", "keyed by tuples"])
def test_what_only_leaves_abstract_is_named_and_restored_later(name, tmp_path):
    make = MODELS[name]
    ckpt.save(tmp_path / "a", model=make())
    model = abstract(make)
    with pytest.warns(UserWarning, match=r"item 'model': only= leaves .* held/") as caught:
        ckpt.restore(tmp_path / "a", model=model, only=nnx.Param)
    told = "Set them before the object is used, or restore all of it"
    assert told in str(caught[0].message)
    with pytest.raises(ckpt.UnsupportedLeaf, match="it has no values"):
        ckpt.save(tmp_path / "b", model=model)
    ckpt.restore(tmp_path / "a", model=model)
    assert_equal(model, make())


class Remembers(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.seen = nnx.Intermediate(jnp.ones(2))


def test_intermediates_that_stay_abstract_are_named(tmp_path):
    ckpt.save(tmp_path / "a", model=Remembers())
    model = abstract(Remembers)
    with pytest.warns(UserWarning, match=r"seen.*nnx.pop\(model, nnx.Intermediate\)"):
        ckpt.restore(tmp_path / "a", model=model)
    nnx.pop(model, nnx.Intermediate)
    nnx.jit(lambda model: model.linear(jnp.ones((1, 2))))(model)


class Base(nnx.Module):
    def __init__(self):
        self.base = nnx.Linear(2, 3, rngs=nnx.Rngs(0))


class WithLoRA(Base):
    def __init__(self):
        super().__init__()
        self.lora = nnx.LoRA(2, 2, 3, rngs=nnx.Rngs(1))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(2))


@pytest.mark.parametrize("missing", ["error", "keep"])
def test_what_an_abstract_model_lacks_is_never_advised_to_be_kept(tmp_path, missing):
    ckpt.save(tmp_path / "a", model=Base())
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", model=abstract(WithLoRA), missing=missing)
    assert {entry.path for entry in caught.value.mismatches} == {
        "dropout/rngs/count", "dropout/rngs/key", "lora/lora_a", "lora/lora_b"
    }  # fmt: skip
    assert all("(abstract)" in entry.wanted for entry in caught.value.mismatches)
    assert 'missing="keep"' not in str(caught.value)
    assert "pass a target with values" in str(caught.value) and "only=" in str(caught.value)


def test_nothing_is_said_of_models_that_were_made_and_of_pytrees(tmp_path):
    ckpt.save(tmp_path / "a", model=WithLoRA())
    ckpt.restore(tmp_path / "a", model=WithLoRA(), only=nnx.Param)
    like = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(WithLoRA())))
    part = ckpt.load(tmp_path / "a", like, item="model", only="base/**")
    assert isinstance(part["base"]["kernel"], jax.Array)
    assert isinstance(part["lora"]["lora_a"], jax.ShapeDtypeStruct)
    ckpt.restore(tmp_path / "a", model=abstract(WithLoRA), only="**")


def spectral(seed):
    model = nnx.SpectralNorm(
        nnx.Linear(2, 3, rngs=nnx.Rngs(seed)), rngs=nnx.Rngs(seed + 1), n_steps=1
    )
    model(jnp.ones((1, 2)) * (seed + 1), update_stats=True)
    return model


def weight(seed):
    return nnx.WeightNorm(
        nnx.Linear(2, 3, rngs=nnx.Rngs(seed)), rngs=nnx.Rngs(seed), use_scale=True
    )


@pytest.mark.parametrize("make", [spectral, weight])
def test_states_that_flax_keys_by_tuples(tmp_path, make):
    saved, fresh = make(0), make(5)
    assert not same(values(saved), values(fresh))
    ckpt.save(tmp_path / "a", model=saved)
    ckpt.restore(tmp_path / "a", model=fresh)
    assert ckpt.verify(tmp_path / "a").ok
    ocp_v1.save(tmp_path / "orbax", nnx.state(saved))
    again, like = make(5), nnx.state(make(5))
    ckpt.restore(tmp_path / "orbax", state=again)
    copy = ckpt.load(tmp_path / "a", make(5), item="model")
    theirs = ocp_v1.load(tmp_path / "a", like, checkpointable_name="model")
    for found in (fresh, copy, theirs, again):
        assert same(values(found), values(saved))


def test_tuples_as_keys_come_back_as_they_were(tmp_path):
    tree = {
        ("a", 1): jnp.arange(3),
        ("a", ("b/c", -2)): {(): 1, 0: 2, "0": {"x": 3}},
        "(1, 2)~": {(1, 2): np.arange(2)},
    }
    ckpt.save(tmp_path / "a", {key: tree[key] for key in tree if key != ("a", ("b/c", -2))})
    ckpt.save(tmp_path / "b", {("a", ("b/c", -2)): {(): 1, 0: 2}})
    loaded = ckpt.load(tmp_path / "a")
    assert list(loaded) == [("a", 1), "(1, 2)~"] and list(loaded["(1, 2)~"]) == [(1, 2)]
    assert ckpt.load(tmp_path / "b") == {("a", ("b/c", -2)): {(): 1, 0: 2}}
    paths = [leaf.path for leaf in ckpt.inspect(tmp_path / "b").items["state"].leaves]
    assert paths == ["('a', ('b~1c', -2))/()", "('a', ('b~1c', -2))/0"]
    for only in (paths[0], "('a', ('b~1c', -2))/*"):
        part = ckpt.load(tmp_path / "b", only=only)
        assert part[("a", ("b/c", -2))][()] == 1
    like = {("a", ("b/c", -2)): {(): 0, 0: 0}}
    assert ckpt.load(tmp_path / "b", like) == {("a", ("b/c", -2)): {(): 1, 0: 2}}
    with pytest.raises(ckpt.UnsupportedLeaf, match="distinguish them"):
        ckpt.save(tmp_path / "c", {(1, 2): 1, "(1, 2)": 2})
