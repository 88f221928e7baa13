"""NNX objects between Orbax and ckpt, both ways, by every route that Orbax has.

Orbax calls the array of a Variable ``kernel/value``, and our paths say ``kernel``: what NNX users saved with
``StandardSave(nnx.state(model))`` loads into their objects, and Orbax loads what we saved into states.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.support import orbax_layouts as layouts
from tests.support.orbax_routes import BY_NAME
from tests.support.trees import abstract


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


# Each writes a state into the directory of steps, as step 3; with the name of the item.
def v0_composite(root, state):
    with ocp.CheckpointManager(root) as manager:
        saved = ocp.args.Composite(
            model=ocp.args.StandardSave(state), n=ocp.args.JsonSave({"a": 1})
        )
        manager.save(3, args=saved)


def v1_checkpointables(root, state):
    ocp_v1.save_checkpointables(root / "3", {"model": state, "other": {"x": jnp.ones(1)}})


WRITERS = {
    "v0_manager": (layouts.save_manager, "default"),
    "v0_manager_pytree": (layouts.save_manager_pytree, "state"),
    "v0_composite": (v0_composite, "model"),
    "v0_standard_checkpointer": (
        lambda root, state: layouts.save_standard(root / "3", state),
        "state",
    ),
    "v0_pytree_checkpointer": (lambda root, state: layouts.save_pytree(root / "3", state), "state"),
    "v1_save": (lambda root, state: layouts.save_v1(root / "3", state), "state"),
    "v1_checkpointables": (v1_checkpointables, "model"),
    "v1_training": (lambda root, state: layouts.save_v1_training(root, state, step=3), "state"),
}
MANAGED = ("v0_manager", "v0_manager_pytree", "v0_composite", "v1_training")


def written(writer, root, state):
    """The path of the step, and the name of the item in it."""
    save, item = WRITERS[writer]
    save(root, state)
    return root / "3", item


def pairs(others):
    """Every kind of object, and every other for a module."""
    turns = itertools.cycle(others)
    return [("module", other) for other in others] + [
        (kind, next(turns)) for kind in OBJECTS if kind != "module"
    ]


@pytest.mark.parametrize(("kind", "writer"), pairs(WRITERS))
def test_what_orbax_wrote_loads_into_nnx_objects(tmp_path, kind, writer):
    saved, target = OBJECTS[kind](1), OBJECTS[kind](2)
    want, before = bits(saved), bits(target)
    assert want != before
    path, item = written(writer, tmp_path / "orbax", state_of(saved))
    loaded = ckpt.load(path, abstract(state_of(target)), item=item)
    assert isinstance(loaded, nnx.State) and bits(loaded) == want
    deep = {"deep": [state_of(target)]}
    deep = ckpt.load(path, deep, item=item, rename=lambda p: f"deep/0/{p}")
    assert bits(deep["deep"][0]) == want
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


@pytest.mark.parametrize(
    ("kind", "writer"),
    [
        *(("linear", "v0_manager"), ("optimizer", "v1_save"), ("metric", "v0_manager")),
        *(("list", "v1_save"), ("dict", "v0_manager")),
    ],
)
def test_an_object_that_was_given_to_orbax_as_it_is(tmp_path, kind, writer):
    """NNX objects are pytrees of their own; the entry for their bookkeeping is no leaf."""
    saved, target = OBJECTS[kind](1), OBJECTS[kind](2)
    path, item = written(writer, tmp_path / "orbax", saved)
    ckpt.restore(path, items={item: target})
    assert bits(target) == bits(saved)


def test_parts_and_renamed_parts_of_what_orbax_wrote(tmp_path):
    saved, target = OBJECTS["module"](1), OBJECTS["module"](2)
    path, item = written("v0_manager", tmp_path / "orbax", nnx.state(saved))
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


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Each object in a step of ours as the item `model`."""
    root = tmp_path_factory.mktemp("ours")
    for kind, make in OBJECTS.items():
        with ckpt.Checkpointer(root / kind) as checkpointer:
            checkpointer.save(3, model=make(1), other={"x": jnp.ones(1)})
    return root


@pytest.mark.parametrize(("kind", "route"), pairs(BY_NAME))
def test_orbax_loads_our_items_into_states(ours, kind, route):
    got = route(ours / kind, 3, "model", abstract(state_of(OBJECTS[kind](2))))
    assert isinstance(got, nnx.State) and bits(got) == bits(OBJECTS[kind](1))
