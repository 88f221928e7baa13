"""NNX models on meshes, and abstract ones: onto other meshes, slots beside their parameters, parts that stay abstract."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from ckpt_flax_nnx import abstract, like_params, restore_or_init
from tests.support.compiling import make_quick_compilation  # noqa: F401 (fixture)
from tests.support.meshes import explicit_mesh
from tests.support.nnx_models import MLP, Annotated, build, same, state_of
from tests.support.trees import Moments


def make_mesh(shape: tuple[int, ...], axis_type: Any = AxisType.Auto) -> Mesh:
    names = ("data", "model")[-len(shape) :]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", [(4, 2), (1,), (8,)])
def test_onto_another_mesh(shape, axis_type, tmp_path):
    with jax.set_mesh(make_mesh((2, 4), axis_type)):
        made = build(0)
    ckpt.save(tmp_path / "a", **made)
    with jax.set_mesh(make_mesh(shape, axis_type)):
        live = build(1)
    sharding = live["model"].linear.kernel.get_value().sharding
    ckpt.restore(tmp_path / "a", **live)
    assert same(state_of(live), state_of(made))
    assert live["model"].linear.kernel.get_value().sharding == sharding


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_into_an_abstract_model(axis_type, tmp_path):
    with jax.set_mesh(make_mesh((2, 4), axis_type)):
        made = build(0)
    ckpt.save(tmp_path / "a", **made)
    mesh = make_mesh((4, 2), axis_type)
    target = abstract(lambda: build(1), mesh)
    assert isinstance(target["model"].linear.kernel.get_value(), jax.ShapeDtypeStruct)
    ckpt.restore(tmp_path / "a", **target)
    assert same(state_of(target), state_of(made))
    for leaf in jax.tree.leaves(state_of(target)):
        assert set(leaf.sharding.device_set) == set(mesh.devices.flat)
    moment = target["optimizer"].opt_state[0].mu["linear"]["kernel"].get_value()
    for kernel in (target["model"].linear.kernel.get_value(), moment):
        assert kernel.sharding.spec == P(None, "model")
    with jax.set_mesh(mesh):
        nnx.jit(lambda m, x: m(x))(target["model"], jnp.ones((4, 8)))


def test_random_streams_on_an_explicit_mesh_of_one_device(tmp_path):
    # There jax gives scalar keys a partition spec of one entry, which it then refuses itself.
    with jax.set_mesh(make_mesh((1,), AxisType.Explicit)):
        rngs, other = nnx.Rngs(0), nnx.Rngs(1)
    ckpt.save(tmp_path / "a", rngs=rngs)
    ckpt.restore(tmp_path / "a", rngs=other)
    assert same(state_of(other), state_of(rngs))


def test_into_what_eval_shape_gives_inside_a_mesh(tmp_path):
    mesh = make_mesh((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        made = Annotated(0)
        ckpt.save(tmp_path / "a", model=made)
        target = nnx.eval_shape(lambda: Annotated(1))
        ckpt.restore(tmp_path / "a", model=target)
    assert same(state_of(target), state_of(made))
    assert target.linear.kernel.get_value().sharding == NamedSharding(mesh, P(None, "model"))


def test_annotations_by_logical_names_and_own_mesh():
    mesh = make_mesh((4, 2))
    rules = (("wide", "model"),)

    def make() -> nnx.Linear:
        metadata = {"out_sharding": (None, "wide"), "sharding_rules": rules, "mesh": mesh}
        return nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_metadata=metadata)

    target = abstract(make, mesh)
    assert target.kernel.get_value().sharding == NamedSharding(mesh, P(None, "model"))


def test_an_annotated_model_without_a_mesh_says_what_to_do():
    with pytest.raises(ValueError, match=r"jax\.set_mesh"):
        abstract(lambda: Annotated(0))


def test_slots_lie_where_their_parameters_lie(tmp_path, mesh):
    def on(shape: tuple[int, ...], *spec: Any) -> Any:
        return jax.device_put(jnp.ones(shape), NamedSharding(mesh, P(*spec)))

    params = {
        "layers": [{"kernel": on((8, 4), "data", "model")}, {"kernel": on((8, 4), "model")}],
        "bias": on((4,), "model"),
    }
    tx = optax.chain(optax.clip(1.0), optax.adamw(1e-2), optax.masked(optax.trace(0.9), MATRICES))
    state = tx.init(params)
    ckpt.save(tmp_path / "a", params=params, opt_state=state)
    target = like_params(jax.eval_shape(tx.init, params), params)
    loaded = ckpt.load(tmp_path / "a", target, item="opt_state")
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for slots in (loaded[1][0].mu, loaded[1][0].nu, loaded[2].inner_state.trace):
        for index in range(2):
            kernel = params["layers"][index]["kernel"]
            assert slots["layers"][index]["kernel"].sharding == kernel.sharding
    assert loaded[1][0].mu["bias"].sharding == params["bias"].sharding
    assert loaded[1][0].count.sharding == NamedSharding(mesh, P())


def MATRICES(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def test_slots_without_a_parameter_of_their_shape(mesh):
    params = {"w": jax.device_put(jnp.ones((128, 128)), NamedSharding(mesh, P("data", "model")))}
    state = like_params(jax.eval_shape(optax.adafactor(1e-2).init, params), params)
    replicated = NamedSharding(mesh, P())
    factored = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (128,)]
    assert len(factored) == 2
    assert all(leaf.sharding == replicated for leaf in factored)
    alone = like_params(jax.eval_shape(optax.adam(1e-2).init, params["w"]), params["w"])
    assert alone[0].mu.sharding == params["w"].sharding
    on_one_device = like_params(jax.eval_shape(optax.adam(1e-2).init, FREE), FREE)
    assert on_one_device[0].mu["w"].sharding == FREE["w"].sharding
    assert on_one_device[0].count.sharding is None


FREE = {"w": jnp.ones(3)}


@pytest.mark.parametrize("on_mesh", [True, False])
def test_restore_or_init(on_mesh, tmp_path):
    mesh = make_mesh((4, 2)) if on_mesh else None

    def make() -> dict[str, Any]:
        if on_mesh:
            return build(0)
        model = MLP(0)
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}

    with ckpt.Checkpointer(tmp_path) as checkpointer:
        items, restored = restore_or_init(checkpointer, make, mesh)
        assert restored is None
        saved = state_of(items)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(saved))
        checkpointer.save(3, **items)
        checkpointer.wait_until_finished()
        again, restored = restore_or_init(checkpointer, make, mesh)
    assert restored.step == 3
    assert same(state_of(again), saved)


class HoldsOne(nnx.Module):
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
        self.one = HoldsOne({"a": jnp.arange(3.0)})
        self.two = self.one


def weight_norm() -> nnx.Module:
    rngs = nnx.Rngs(0)
    model = nnx.WeightNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs)
    model(jnp.ones((1, 4)))
    return model


def arrays() -> tuple[Any, Any]:
    return jnp.arange(3.0), jnp.ones(2, jnp.int32)


MODELS: dict[str, Callable[[], Any]] = {
    "array": lambda: HoldsOne(arrays()[0]),
    "dict": lambda: HoldsOne({"a": arrays()[0], "b": arrays()[1]}),
    "list": lambda: HoldsOne(list(arrays())),
    "tuple": lambda: HoldsOne(arrays()),
    "named tuple": lambda: HoldsOne(Moments(*arrays())),
    "nested": lambda: HoldsOne({"a": [arrays()[0], {"b": (arrays()[1],)}]}),
    "keyed by tuples": lambda: HoldsOne({("a", 1): arrays()[0]}),
    "with a variable": lambda: HoldsOne({"a": arrays()[0], "v": nnx.Param(jnp.ones(2))}),
    "in a module in a list": lambda: HoldsOne([HoldsOne({"a": arrays()[0]})]),
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
def some_mesh(request: pytest.FixtureRequest) -> Any:
    return explicit_mesh((2,), ("model",)) if request.param else None


@pytest.mark.parametrize("name", MODELS)
def test_all_of_an_abstract_model_is_restored(name, some_mesh, tmp_path):
    make = MODELS[name]
    ckpt.save(tmp_path / "a", model=make())
    model = abstract(make, some_mesh)
    ckpt.restore(tmp_path / "a", model=model)
    assert_equal(model, make())
    if some_mesh is not None:
        state = jax.tree.leaves(nnx.state(model))
        assert all(leaf.sharding.device_set == set(some_mesh.devices.flat) for leaf in state)
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
