"""NNX objects between Orbax and ckpt, both ways, by every route that Orbax has.

Orbax calls the array of a Variable ``kernel/value``, and our paths say ``kernel``: what NNX users saved with
``StandardSave(nnx.state(model))`` loads into their objects, and Orbax loads what we saved into states.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)

# Orbax warns of every load that is given no sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


class Net(nnx.Module):
    """A Variable of every sort: parameters, statistics, keys, a tree, a number; tied ones; a bare array."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs) for _ in range(11)])
        self.heads = nnx.Dict({"0": nnx.BatchNorm(3, rngs=rngs)})
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.layers[3].kernel
        self.tree = nnx.Variable({"a": jnp.ones(2), "b": (jnp.zeros(1), jnp.ones(1))})
        self.bare = nnx.data(jnp.arange(3))


def linear(seed):
    return nnx.Linear(2, 4, rngs=nnx.Rngs(seed))


def optimizer(seed):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))
    model = linear(seed)
    made = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(seed):
        made.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    return made


def metric(seed):
    made = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    for step in range(seed + 1):
        made.update(logits=jnp.eye(3), labels=jnp.arange(3), loss=jnp.float32(step + seed))
    return made


def rngs(seed):
    made = nnx.Rngs(seed, params=jax.random.key(seed + 1, impl="rbg"))
    for _ in range(seed):
        made.params()
    return made


OBJECTS = {
    "module": lambda seed: Net(nnx.Rngs(seed)),
    "linear": linear,
    "optimizer": optimizer,
    "rngs": rngs,
    "metric": metric,
    "list": lambda seed: nnx.List([linear(seed), linear(seed + 1)]),
    "dict": lambda seed: nnx.Dict({"a": linear(seed), "1": linear(seed + 1)}),
    "state": lambda seed: nnx.state(linear(seed)),
    "params": lambda seed: nnx.state(Net(nnx.Rngs(seed)), nnx.Param),
}


def bits(obj):
    """Path and bits of every value in an object; the two sides may name int keys by text."""

    def one(leaf):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return str(leaf.dtype), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
        array = np.asarray(leaf)
        return str(array.dtype), array.shape, array.tobytes()

    leaves = jax.tree_util.tree_flatten_with_path(state_of(obj))[0]
    assert leaves
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): one(leaf) for path, leaf in leaves
    }


def state_of(obj):
    return obj if isinstance(obj, nnx.State) else nnx.state(obj)


def abstract(obj):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        state_of(obj),
    )


# ------------------------------------------------------------------------------ what Orbax wrote
# Each writes a state into the directory of steps, and gives the path and the name of the item.


def v0_manager(root, state):
    with ocp.CheckpointManager(root) as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
    return root / "3", "default"


def v0_manager_pytree(root, state):
    with ocp.CheckpointManager(root) as manager:
        manager.save(3, args=ocp.args.PyTreeSave(state))
    return root / "3", "default"


def v0_composite(root, state):
    with ocp.CheckpointManager(root) as manager:
        saved = ocp.args.Composite(
            model=ocp.args.StandardSave(state), n=ocp.args.JsonSave({"a": 1})
        )
        manager.save(3, args=saved)
    return root / "3", "model"


def v0_standard_checkpointer(root, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "3", state)
    return root / "3", "state"


def v0_pytree_checkpointer(root, state):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(root / "3", state)
    return root / "3", "state"


def v1_save(root, state):
    ocp_v1.save(root / "3", state)
    return root / "3", "state"


def v1_checkpointables(root, state):
    ocp_v1.save_checkpointables(root / "3", {"model": state, "other": {"x": jnp.ones(1)}})
    return root / "3", "model"


def v1_training(root, state):
    with ocp_v1.training.Checkpointer(root) as checkpointer:
        checkpointer.save(3, state)
    return root / "3", "state"


WRITERS = {
    writer.__name__: writer
    for writer in (
        v0_manager,
        v0_manager_pytree,
        v0_composite,
        v0_standard_checkpointer,
        v0_pytree_checkpointer,
        v1_save,
        v1_checkpointables,
        v1_training,
    )
}
MANAGED = ("v0_manager", "v0_manager_pytree", "v0_composite", "v1_training")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", OBJECTS)
def test_what_orbax_wrote_loads_into_nnx_objects(tmp_path, kind, writer):
    saved, target = OBJECTS[kind](1), OBJECTS[kind](2)
    want, before = bits(saved), bits(target)
    assert want != before
    path, item = WRITERS[writer](tmp_path / "orbax", state_of(saved))
    loaded = ckpt.load(path, abstract(target), item=item)
    assert isinstance(loaded, nnx.State) and bits(loaded) == want
    assert (
        bits(
            ckpt.load(
                path, {"deep": [state_of(target)]}, item=item, rename=lambda p: f"deep/0/{p}"
            )["deep"][0]
        )
        == want
    )
    assert bits(target) == before
    restored = ckpt.restore(path, items={item: target})
    assert bits(restored[item]) == want
    if kind not in ("state", "params"):
        assert restored[item] is target
    if writer in MANAGED:
        again = OBJECTS[kind](2)
        with ckpt.Checkpointer(tmp_path / "orbax", read_only=True) as checkpointer:
            found = checkpointer.restore_latest(items={item: again})
        assert found.step == 3 and bits(found[item]) == want


@pytest.mark.parametrize("writer", ["v0_manager", "v1_save"])
@pytest.mark.parametrize("kind", ["linear", "optimizer", "metric", "list", "dict"])
def test_an_object_that_was_given_to_orbax_as_it_is(tmp_path, kind, writer):
    """NNX objects are pytrees of their own; the entry for their bookkeeping is no leaf."""
    saved, target = OBJECTS[kind](1), OBJECTS[kind](2)
    path, item = WRITERS[writer](tmp_path / "orbax", saved)
    ckpt.restore(path, items={item: target})
    assert bits(target) == bits(saved)


@pytest.mark.parametrize("writer", WRITERS)
def test_pure_dicts_of_orbax_load_into_modules_and_dicts(tmp_path, writer):
    saved, target = OBJECTS["module"](1), OBJECTS["module"](2)
    pure = nnx.to_pure_dict(nnx.state(saved))
    path, item = WRITERS[writer](tmp_path / "orbax", pure)
    loaded = ckpt.load(path, nnx.to_pure_dict(nnx.state(target)), item=item)
    assert jax.tree.structure(loaded) == jax.tree.structure(pure)
    ckpt.restore(path, items={item: target})
    assert bits(target) == bits(saved)


def test_parts_and_renamed_parts_of_what_orbax_wrote(tmp_path):
    saved, target = OBJECTS["module"](1), OBJECTS["module"](2)
    path, item = v0_manager(tmp_path / "orbax", nnx.state(saved))
    ckpt.restore(path, items={item: target}, only=nnx.Param)
    assert bits(nnx.state(target, nnx.Param)) == bits(nnx.state(saved, nnx.Param))
    assert bits(nnx.state(target, nnx.RngState)) != bits(nnx.state(saved, nnx.RngState))

    class Renamed(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.List([nnx.Linear(2, 3, rngs=rngs)])

    renamed = Renamed(nnx.Rngs(5))
    ckpt.restore(path, items={item: renamed}, rename={"layers": "stem"}, unexpected="ignore")
    assert bits(renamed.stem[0]) == bits(saved.layers[0])
    one = Renamed(nnx.Rngs(5))
    whole = {"layers/0/kernel": "stem/0/kernel", "layers/0/bias/value": "stem/0/bias"}
    ckpt.restore(path, items={item: one}, rename=whole, unexpected="ignore")
    assert bits(one.stem[0]) == bits(saved.layers[0])
    head = ckpt.load(path, item=item, only="layers/0/**")
    np.testing.assert_array_equal(head["layers"]["0"]["kernel"]["value"], saved.layers[0].kernel)


def test_what_is_missing_is_said_in_our_paths(tmp_path):
    path, item = v0_manager(tmp_path / "orbax", nnx.state(linear(1)))

    class Two(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jnp.ones((2, 4)))
            self.extra = nnx.Param(jnp.ones(3))

    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(path, items={item: Two(nnx.Rngs(0))})
    assert {(entry.path, entry.kind) for entry in caught.value.mismatches} == {
        ("extra", "missing"),
        ("bias/value", "unexpected"),
    }


def test_a_variable_that_is_called_value_is_no_array_of_another(tmp_path):
    """Names on disk that look like those of Variables are not changed."""

    class Odd(nnx.Module):
        def __init__(self, start):
            self.inner = nnx.Dict({"value": nnx.Param(jnp.arange(2.0) + start)})
            self.value = nnx.Param(jnp.arange(3.0) + start)
            self.bare = nnx.data({"value": jnp.arange(4.0) + start})

    saved, target = Odd(10), Odd(0)
    path, item = v0_manager(tmp_path / "orbax", nnx.state(saved))
    ckpt.restore(path, items={item: target})
    assert bits(target) == bits(saved)
    ckpt.save(tmp_path / "ours", saved)
    got = ocp_v1.load(tmp_path / "ours", abstract(target))
    assert bits(got) == bits(saved)
    assert bits(ckpt.load(tmp_path / "ours", Odd(0))) == bits(saved)


# ------------------------------------------------------------------------------ what we wrote
# Each reads an item of a step with a target.


def read_v0_composite(root, item, like):
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(
            3, args=ocp.args.Composite(**{item: ocp.args.StandardRestore(like)})
        )[item]


def read_v0_composite_pytree(root, item, like):
    how = ocp.checkpoint_utils.construct_restore_args(like)
    args = ocp.args.PyTreeRestore(item=like, restore_args=how)
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(3, args=ocp.args.Composite(**{item: args}))[item]


def read_v0_standard_checkpointer(root, item, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(root / "3" / item, like)


def read_v0_pytree_checkpointer(root, item, like):
    how = ocp.checkpoint_utils.construct_restore_args(like)
    with ocp.PyTreeCheckpointer() as checkpointer:
        args = ocp.args.PyTreeRestore(item=like, restore_args=how)
        return checkpointer.restore(root / "3" / item, args=args)


def read_v1_load(root, item, like):
    return ocp_v1.load(root / "3", like, checkpointable_name=item)


def read_v1_checkpointables(root, item, like):
    return ocp_v1.load_checkpointables(root / "3", {item: like})[item]


def read_v1_training(root, item, like):
    with ocp_v1.training.Checkpointer(root) as checkpointer:
        return checkpointer.load(3, like, checkpointable_name=item)


def read_v0_single(root, _item, like):
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(3, args=ocp.args.StandardRestore(like))


def read_v0_single_pytree(root, _item, like):
    how = ocp.checkpoint_utils.construct_restore_args(like)
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(3, args=ocp.args.PyTreeRestore(item=like, restore_args=how))


NAMED = [
    read_v0_composite,
    read_v0_composite_pytree,
    read_v0_standard_checkpointer,
    read_v0_pytree_checkpointer,
    read_v1_load,
    read_v1_checkpointables,
    read_v1_training,
]
POSITIONAL = NAMED


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Each object in a step of ours: as the item `model`, and as the one state."""
    root = tmp_path_factory.mktemp("ours")
    for kind, make in OBJECTS.items():
        with ckpt.Checkpointer(root / kind / "named") as checkpointer:
            checkpointer.save(3, model=make(1), other={"x": jnp.ones(1)})
        with ckpt.Checkpointer(root / kind / "single") as checkpointer:
            checkpointer.save(3, make(1))
    return root


@pytest.mark.parametrize("reader", NAMED, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("kind", OBJECTS)
def test_orbax_loads_our_items_into_states(ours, kind, reader):
    got = reader(ours / kind / "named", "model", abstract(OBJECTS[kind](2)))
    assert isinstance(got, nnx.State) and bits(got) == bits(OBJECTS[kind](1))


@pytest.mark.parametrize("reader", POSITIONAL, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("kind", OBJECTS)
def test_orbax_loads_our_single_state_into_states(ours, kind, reader):
    got = reader(ours / kind / "single", "state", abstract(OBJECTS[kind](2)))
    assert isinstance(got, nnx.State) and bits(got) == bits(OBJECTS[kind](1))


@pytest.mark.parametrize("reader", [read_v0_single, read_v0_single_pytree])
def test_the_item_default_is_a_managers_single_item(reader, tmp_path):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, default=OBJECTS["module"](1))
    got = reader(tmp_path, "default", abstract(OBJECTS["module"](2)))
    assert isinstance(got, nnx.State) and bits(got) == bits(OBJECTS["module"](1))


def test_orbax_goes_on_from_ours_and_we_from_orbax(tmp_path):
    """A run that changes hands twice: the same directory of steps, the same objects."""
    model, adam = linear(1), optimizer(1)
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, model=model, optimizer=adam)
    args = ocp.args
    like = {"model": abstract(linear(2)), "optimizer": abstract(optimizer(2))}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        got = manager.restore(
            1, args=args.Composite(**{k: args.StandardRestore(v) for k, v in like.items()})
        )
        manager.save(
            2, args=args.Composite(**{k: args.StandardSave(got[k]) for k in ("model", "optimizer")})
        )
    model_2, adam_2 = linear(3), optimizer(3)
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        restored = checkpointer.restore_latest(model=model_2, optimizer=adam_2)
    assert restored.step == 2
    assert bits(model_2) == bits(model) and bits(adam_2) == bits(adam)


def test_sharded_modules_in_both_directions(tmp_path):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))

    def sharded(seed):
        model = nnx.Linear(8, 4, rngs=nnx.Rngs(seed))
        model.kernel.set_value(jax.device_put(model.kernel[...], NamedSharding(mesh, P("x", "y"))))
        model.bias.set_value(jax.device_put(model.bias[...], NamedSharding(mesh, P("y"))))
        return model

    saved = sharded(1)
    ckpt.save(tmp_path / "ours", saved)
    got = ocp_v1.load(tmp_path / "ours", abstract(sharded(2)))
    assert bits(got) == bits(saved)
    assert got["kernel"].get_value().sharding == saved.kernel.get_value().sharding
    path, item = v0_manager(tmp_path / "orbax", nnx.state(saved))
    target = sharded(3)
    ckpt.restore(path, items={item: target})
    assert bits(target) == bits(saved)
    assert target.kernel.get_value().sharding == saved.kernel.get_value().sharding


def test_orbax_and_we_describe_a_state_alike(tmp_path):
    """Ours has the same leaves in Orbax's metadata as what Orbax writes of the same state."""
    for kind, make in OBJECTS.items():
        path, _ = v1_save(tmp_path / kind / "orbax", state_of(make(1)))
        ckpt.save(tmp_path / kind / "ours", make(1))
        trees = [
            ocp.StandardCheckpointer().metadata(where / "state").item_metadata.tree
            for where in (path, tmp_path / kind / "ours")
        ]
        one, other = (jax.tree.map(lambda leaf: leaf.shape, tree) for tree in trees)
        assert one == other, kind


# ---------------------------------------------------------------------------- names stay as they were


def test_paths_that_people_see_do_without_the_key_of_orbax(tmp_path):
    model = OBJECTS["module"](1)
    ckpt.save(tmp_path / "one", model)
    paths = {leaf.path for leaf in ckpt.inspect(tmp_path / "one").items["state"].leaves}
    assert {
        "layers/0/kernel",
        "heads/0/mean",
        "dropout/rngs/key",
        "tree/a",
        "tree/b/1",
        "bare",
    } <= paths
    tree = ckpt.load(tmp_path / "one")
    np.testing.assert_array_equal(tree["layers"][10]["kernel"], model.layers[10].kernel)
    np.testing.assert_array_equal(tree["tree"]["b"][1], model.tree.get_value()["b"][1])
    part = ckpt.load(tmp_path / "one", only=["layers/1/kernel", "tree/b/*"])
    assert list(part) == ["layers", "tree"] and list(part["layers"][1]) == ["kernel"]
    pure = ckpt.load(tmp_path / "one", nnx.to_pure_dict(nnx.state(OBJECTS["module"](2))))
    np.testing.assert_array_equal(pure["layers"][1]["bias"], model.layers[1].bias)
    renamed = ckpt.load(tmp_path / "one", only="layers/0/**", rename={"layers": "stem"})
    assert list(renamed["stem"]["0"]) == ["bias", "kernel"] or set(renamed["stem"]["0"]) == {
        "bias",
        "kernel",
    }
    assert ckpt.verify(tmp_path / "one").ok


def test_pure_dicts_of_ours_stay_pure_for_orbax(tmp_path):
    pure = nnx.to_pure_dict(nnx.state(linear(1)))
    ckpt.save(tmp_path / "pure", pure)
    got = ocp_v1.load(tmp_path / "pure", jax.tree.map(jnp.zeros_like, pure))
    assert bits(got) == bits(pure) if isinstance(got, nnx.Module) else True
    np.testing.assert_array_equal(got["kernel"], pure["kernel"])
