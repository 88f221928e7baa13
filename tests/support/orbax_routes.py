"""Every route by which Orbax v0 and v1 load a checkpoint, and trees for them."""

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp_v1

from tests.support.orbax import put
from tests.support.orbax_layouts import Moments as Moments
from tests.support.trees import abstract, assert_same


def sharded_tree():
    return {
        "params": {
            "w": put(jnp.arange(32.0).reshape(8, 4), "x", "y"),
            "rows": put(jnp.arange(32, dtype=jnp.int32).reshape(8, 4), ("x", "y")),
            "half": put(jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8), None, "y"),
            "all": put(jnp.arange(16.0)),
            "large": put(jnp.arange(2**18, dtype=jnp.float32).reshape(512, 512), "y", "x"),
        },
        "key": jax.random.key(1),
        "sharded_keys": put(jax.random.split(jax.random.key(3), 8), "x"),
    }


def as_orbax_gives(tree):
    """The tree in the containers that Orbax restores without a target."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return {name: as_orbax_gives(getattr(tree, name)) for name in tree._fields}
    if isinstance(tree, dict):
        return {str(key): as_orbax_gives(value) for key, value in tree.items()}
    if isinstance(tree, list) or (isinstance(tree, tuple) and tree):
        return [as_orbax_gives(value) for value in tree]
    return tree


# Each takes the directory of steps, the step, the item's name and a target (or None for none).
def restore_args_of(like):
    return ocp.checkpoint_utils.construct_restore_args(like)


def v0_no_args(root, step, item, _like):
    with ocp.CheckpointManager(root) as manager:
        got = manager.restore(step)
    return got if item == "default" else got[item]


def v0_composite_standard(root, step, item, like):
    with ocp.CheckpointManager(root) as manager:
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(like)})
        return manager.restore(step, args=args)[item]


def v0_composite_pytree(root, step, item, like):
    settings = {} if like is None else {"item": like, "restore_args": restore_args_of(like)}
    with ocp.CheckpointManager(root) as manager:
        args = ocp.args.Composite(**{item: ocp.args.PyTreeRestore(**settings)})
        return manager.restore(step, args=args)[item]


def v0_standard_checkpointer(root, step, item, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(root / str(step) / item, like)


def v0_pytree_checkpointer(root, step, item, like):
    settings = {} if like is None else {"item": like, "restore_args": restore_args_of(like)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(
            root / str(step) / item, args=ocp.args.PyTreeRestore(**settings)
        )


def v1_load(root, step, _item, like):
    return ocp_v1.load(root / str(step), like)


def v1_load_item(root, step, item, like):
    return ocp_v1.load(root / str(step), like, checkpointable_name=item)


def v1_load_checkpointables(root, step, item, like):
    names = None if like is None else {item: like}
    return ocp_v1.load_checkpointables(root / str(step), names)[item]


def v1_training(root, step, item, like):
    with ocp_v1.training.Checkpointer(root) as checkpointer:
        return checkpointer.load(step, like, checkpointable_name=item)


def v1_training_checkpointables(root, step, item, like):
    names = None if like is None else {item: like}
    with ocp_v1.training.Checkpointer(root) as checkpointer:
        return checkpointer.load_checkpointables(step, names)[item]


BY_NAME = [  # with a target
    v0_composite_standard,
    v0_composite_pytree,
    v0_standard_checkpointer,
    v0_pytree_checkpointer,
    v1_load_item,
    v1_load_checkpointables,
    v1_training,
]
ROUTES = [v0_no_args, *BY_NAME, v1_load, v1_training_checkpointables]


def named(routes):
    return [pytest.param(route, id=route.__name__) for route in routes]


def check_route(route, root, step, item, tree):
    """One route, with a target on the saved sharding and without a target."""
    if route is not v0_no_args:
        assert_same(route(root, step, item, abstract(tree)), tree, sharding=True)
    got = route(root, step, item, None)
    # Without a target v0 gives numpy for what has no sharding of several devices.
    assert_same(got, as_orbax_gives(tree), numpy_as_jax=route.__name__.startswith("v0"))
