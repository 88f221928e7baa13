"""NNX models on meshes: annotated, abstract, onto other meshes, slots beside their parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import ckpt_core as ckpt
from ckpt_flax_nnx import abstract, like_params, restore_or_init
from tests.support.compiling import make_quick_compilation  # noqa: F401 (fixture)
from tests.support.nnx_models import MLP, Annotated, build, same, state_of


def make_mesh(shape: tuple[int, ...], axis_type: Any = AxisType.Auto) -> Mesh:
    names = ("data", "model")[-len(shape) :]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


@pytest.mark.parametrize(
    ("shape", "axis_type"),
    [
        ((4, 2), AxisType.Auto),
        ((1,), AxisType.Explicit),
        ((4, 2), AxisType.Explicit),
        ((8,), AxisType.Auto),
        ((8,), AxisType.Explicit),
        ((1,), AxisType.Auto),
    ],
)
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
