"""Trains as Simply does: policies, a Composite of state and JSON, and a restore by a Checkpointer from metadata."""

import pathlib
import pydoc
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

STEPS, EVERY, FORMAT = 12, 2, {"__checkpoint_format__": "Plain"}
directory, mesh = pathlib.Path(sys.argv[1]), jax.sharding.Mesh(jax.devices(), ("data",))


def abstract_of(leaf):
    sharding = NamedSharding(mesh, P("data") if len(leaf.shape) == 2 else P())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def handler_at(path):
    kinds = dict.fromkeys(("metadata", "data"), ocp.JsonCheckpointHandler)
    kinds["state"] = ocp.PyTreeCheckpointHandler
    if (names := ocp.metadata.get_step_metadata(path).item_handlers) is not None:
        kinds = {item: pydoc.locate(name) for item, name in names.items()}
    if kinds["state"] is ocp.StandardCheckpointHandler:
        kinds["state"] = ocp.PyTreeCheckpointHandler
    return ocp.CompositeCheckpointHandler(**{item: kind() for item, kind in kinds.items()})


def load(step):
    path = directory / str(step)
    with ocp.Checkpointer(handler_at(path)) as checkpointer:
        saved = checkpointer.metadata(path).item_metadata
        json = ocp.args.Composite(metadata=ocp.args.JsonRestore(), data=ocp.args.JsonRestore())
        restored = checkpointer.restore(path, args=json)
        assert restored.metadata == FORMAT
        item = jax.tree.map(abstract_of, saved["state"].tree)
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        tree = ocp.args.Composite(state=ocp.args.PyTreeRestore(item, restore_args=restore_args))
        return checkpointer.restore(path, tree)["state"], restored["data"]["train_iter_state"]


def init():
    embed = jax.random.normal(jax.random.key(0), (32, 16)) / 4
    params = {"embed": embed, "head": embed.T, "bias": jnp.zeros(32)}
    return {"params": params, "m": jax.tree.map(jnp.zeros_like, params), "steps": jnp.int32(0)}


def loss_of(params, tokens):
    logits = jnp.tanh(params["embed"][tokens[:, :-1]]) @ params["head"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def update(state, tokens):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], tokens)
    m = jax.tree.map(lambda m, grad: 0.9 * m + grad, state["m"], grads)
    params = jax.tree.map(lambda param, m: param - 0.1 * m, state["params"], m)
    return {"params": params, "m": m, "steps": state["steps"] + 1}, loss


shardings = jax.tree.map(lambda leaf: abstract_of(leaf).sharding, jax.eval_shape(init))
update = jax.jit(update, out_shardings=(shardings, None), donate_argnames="state")
rows = np.random.default_rng(0).integers(0, 32, (999, 9))
batches = iter(grain.MapDataset.source(rows).shuffle(seed=1).batch(8).to_iter_dataset())

policies = ocp.checkpoint_managers
saved = [policies.FixedIntervalPolicy(EVERY), policies.SpecificStepsPolicy([STEPS - 1])]
kept = [policies.LatestN(1), policies.EveryNSteps(interval_steps=4)]
options = ocp.CheckpointManagerOptions(
    save_decision_policy=policies.AnySavePolicy(saved),
    preservation_policy=policies.AnyPreservationPolicy(kept),
    async_options=ocp.AsyncOptions(timeout_secs=360000),
)
manager = ocp.CheckpointManager(directory, options=options)
state = jax.jit(init, out_shardings=shardings)()
if (latest := manager.latest_step()) is not None:
    state, position = load(latest)
    batches.set_state(position)
for step in range(int(state["steps"]), STEPS):
    data = {"train_iter_state": batches.get_state()}
    items = {"metadata": ocp.args.JsonSave(FORMAT), "data": ocp.args.JsonSave(data)}
    manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), **items))
    state, loss = update(state, jax.device_put(next(batches), NamedSharding(mesh, P("data"))))
    print("step", step, float(loss))
manager.close()
