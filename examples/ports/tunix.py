"""Trains as Tunix does: LoRA parameters and their optimizer by the second API, with policies and a Context."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import pathways as ocp_pathways
from orbax.checkpoint import utils as ocp_utils
from orbax.checkpoint import v1 as ocp

STEPS, EVERY, mesh = 12, 2, jax.sharding.Mesh(jax.devices(), ("fsdp",))


def save(step, force=False):
    items = {
        "model_params": nnx.state(model, nnx.LoRAParam),
        "optimizer_state": jax.tree.map(everywhere, nnx.state(optimizer, nnx.optimizer.OptState)),
    }
    more = {"force": force, "custom_metadata": {"role": "actor"}}
    return checkpointer.save_checkpointables_async(step, items, **more) is not None


def maybe_restore():
    if checkpointer.latest is None:
        return 0, {}
    metadata = checkpointer.checkpointables_metadata(step := checkpointer.latest.step)
    wanted = {"model_params": nnx.state(model, nnx.LoRAParam)}
    if "optimizer_state" in metadata.metadata:
        state = nnx.state(optimizer, nnx.optimizer.OptState)
        wanted["optimizer_state"] = jax.tree.map(abstract_of, state)
    partial = ocp.Context(context)
    partial.pytree.loading.partial_load = True
    with partial:
        restored = checkpointer.load_checkpointables(step, wanted)
    nnx.update(optimizer, restored["optimizer_state"])
    nnx.update(model, restored["model_params"])
    return step, metadata.custom_metadata


def everywhere(leaf):
    replicated = ocp_utils.fully_replicated_host_local_array_to_global_array
    return replicated(leaf) if len(leaf.devices()) == 1 and len(jax.devices()) > 1 else leaf


def abstract_of(leaf):
    sharding = NamedSharding(mesh, P("fsdp") if leaf.ndim == 2 else P())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@nnx.jit
def train_step(model, optimizer, x):
    def loss_of(model):
        return jnp.square(model(x) - x[:, :4]).mean()

    loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, grads)
    return loss


up, down = (nnx.LoRALinear(*size, lora_rank=4, rngs=nnx.Rngs(0)) for size in ((8, 16), (16, 4)))
model = nnx.Sequential(up, nnx.gelu, down)
shardings = jax.tree.map(lambda leaf: abstract_of(leaf).sharding, nnx.state(model))
nnx.update(model, jax.device_put(nnx.state(model), shardings))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.LoRAParam)

context = ocp.Context()
context.asynchronous.timeout_secs = 1200
context.pathways_options.checkpointing_impl = ocp_pathways.CheckpointingImpl.from_options()
checkpointer = ocp.training.Checkpointer(
    sys.argv[1],
    context=context,
    save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(EVERY),
    preservation_policy=ocp.training.preservation_policies.LatestN(n=3),
    step_name_format=ocp.path.step.standard_name_format(),
)
trained, _ = maybe_restore()
for step in range(STEPS):
    x = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
    if step < trained:
        continue
    print("step", step, float(train_step(model, optimizer, x)))
    save(step + 1)
if checkpointer.latest is None or checkpointer.latest.step < STEPS:
    save(STEPS, force=True)
checkpointer.close()
