"""Trains as openpi does: an NNX state in two items, and as a third one the files of a function of its own."""

import asyncio
import dataclasses
import sys

import jax
import optax
import orbax.checkpoint as ocp
import orbax.checkpoint.future as future
from flax import nnx, struct
from jax.sharding import NamedSharding, PartitionSpec as P

STEPS, EVERY, mesh = 12, 1, jax.make_mesh((jax.device_count(),), ("fsdp",))
trainable, tx = nnx.All(nnx.Param, nnx.PathContains(2)), optax.adamw(1e-2)


class AssetsHandler(ocp.AsyncCheckpointHandler):
    def save(self, directory, args):
        if jax.process_index() == 0:
            args.write(directory)

    async def async_save(self, directory, args):
        work = asyncio.to_thread(self.save, directory, args)
        return [future.CommitFutureAwaitingContractedSignals(work)]

    def restore(self, *args, **kwargs):
        raise NotImplementedError


@ocp.args.register_with_handler(AssetsHandler, for_save=True)
@dataclasses.dataclass
class AssetsSave(ocp.args.CheckpointArgs):
    write: object


@ocp.args.register_with_handler(AssetsHandler, for_restore=True)
class AssetsRestore(ocp.args.CheckpointArgs): ...


class TrainState(struct.PyTreeNode):
    step: object
    params: object
    model_def: nnx.GraphDef
    opt_state: object


def init():
    vision = nnx.Linear(8, 16, param_dtype="bfloat16", rngs=nnx.Rngs(0))
    model = nnx.Sequential(vision, nnx.swish, nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
    model_def, params = nnx.split(model)
    return TrainState(jax.numpy.int32(0), params, model_def, tx.init(params.filter(trainable)))


def train_step(state):
    seen = jax.random.normal(jax.random.fold_in(jax.random.key(0), state.step), (16, 8))
    model = nnx.merge(state.model_def, state.params)
    loss, grads = nnx.value_and_grad(
        lambda model: optax.l2_loss(model(seen), seen[:, :4] * seen[:, 4:]).mean(),
        argnums=nnx.DiffState(0, trainable),
    )(model)
    updates, opt_state = tx.update(grads, state.opt_state, params := state.params.filter(trainable))
    nnx.update(model, optax.apply_updates(params, updates))
    return TrainState(state.step + 1, nnx.state(model), state.model_def, opt_state), loss


def items_of(state):
    return {"train_state": state.replace(params={}), "params": {"params": state.params}}


split, whole = (NamedSharding(mesh, spec) for spec in (P("fsdp"), P()))
shardings = jax.tree.map(lambda leaf: split if leaf.ndim == 2 else whole, jax.eval_shape(init))
train_step = jax.jit(train_step, out_shardings=(shardings, None))
as_tree, timeout = ocp.PyTreeCheckpointHandler, ocp.AsyncOptions(timeout_secs=7200)
manager = ocp.CheckpointManager(
    sys.argv[1],
    item_handlers={"assets": AssetsHandler(), "train_state": as_tree(), "params": as_tree()},
    options=ocp.CheckpointManagerOptions(max_to_keep=1, keep_period=4, async_options=timeout),
)
state = jax.jit(init, out_shardings=shardings)()
if manager.all_steps():
    items = manager.restore(None, items=items_of(jax.eval_shape(init)))
    state = items["train_state"].replace(params=items["params"]["params"])
for step in range(start := int(state.step), STEPS):
    state, loss = train_step(state)
    print("step", step, float(loss))
    if (step % EVERY == 0 and step > start) or step == STEPS - 1:
        items = {"assets": lambda path: (path / "norm_stats.json").write_text('{"std": 1.0}')}
        manager.save(step, items | items_of(state))
manager.wait_until_finished()
