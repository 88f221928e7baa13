"""Trains as MaxText does: a CheckpointManager with Grain, several processes, emergency checkpoints."""

import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

directory, *local = sys.argv[1:]
mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))


def spread(leaf):
    spec = P("fsdp") if leaf.ndim == 2 else P()
    return jax.make_array_from_callback(
        leaf.shape, NamedSharding(mesh, spec), lambda index: np.asarray(leaf)[index]
    )


def make_manager(state):
    if local:
        return emergency.CheckpointManager(
            local[0],
            directory,
            global_mesh=mesh,
            abstract_state=jax.tree.map(ocp.utils.to_shape_dtype_struct, state),
            options=emergency.CheckpointManagerOptions(
                local=emergency.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
                persistent=emergency.PersistentCheckpointOptions(save_interval_steps=4),
            ),
        )
    return ocp.CheckpointManager(
        directory,
        item_handlers={
            "items": ocp.PyTreeCheckpointHandler(save_concurrent_gb=96, use_zarr3=True),
            "iter": grain.checkpoint.CheckpointHandler(),
        },
        options=ocp.CheckpointManagerOptions(
            create=True,
            max_to_keep=3,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(timeout_secs=300),
        ),
    )


def save(manager, step, state, batches):
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=2**20), state)
    return manager.save(
        step,
        args=ocp.args.Composite(
            items=ocp.args.PyTreeSave(item=state, save_args=save_args),
            iter=grain.checkpoint.CheckpointSave(item=batches),
        ),
    )


def restore(manager, step, state, batches):
    restore_args = jax.tree.map(
        lambda leaf: ocp.type_handlers.ArrayRestoreArgs(sharding=leaf.sharding), state
    )
    restored = manager.restore(
        step,
        args=ocp.args.Composite(
            items=ocp.args.PyTreeRestore(item=state, restore_args=restore_args),
            iter=grain.checkpoint.CheckpointRestore(item=batches),
        ),
    )
    return restored["items"], restored["iter"]


def loss_of(params, x):
    return jnp.square(jnp.tanh(x @ params["in"]) @ params["out"] + params["bias"] - x).mean()


@jax.jit
def update(state, x):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


def example(number):
    return np.random.default_rng(number).normal(size=(16,)).astype(np.float32)


tx = optax.adamw(1e-2)
one, two = jax.random.split(jax.random.key(0))
params = {
    "in": jax.random.normal(one, (16, 64)) / 4,
    "out": jax.random.normal(two, (64, 16)) / 8,
    "bias": jnp.zeros((16,)),
}
state = {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)}
state = jax.tree.map(spread, state)
mine = slice(jax.process_index(), None, jax.process_count())
numbers = grain.MapDataset.range(4096).shuffle(seed=1)[mine]
batches = iter(numbers.map(example).batch(8).to_iter_dataset())

manager = make_manager(state)
start = 0
if manager.latest_step() is not None:
    state, batches = restore(manager, manager.latest_step(), state, batches)
    start = manager.latest_step() + 1
for step in range(start, 12):
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("fsdp")), next(batches))
    state, loss = update(state, x)
    print("step", step, float(loss))
    save(manager, step, state, batches)
manager.wait_until_finished()
manager.close()
