"""Trains as NanoDO does: a CheckpointManager over a dict of checkpointers, and the step that the state counts."""

import sys

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

STEPS, EVERY = 12, 2
mesh = jax.sharding.Mesh(jax.devices(), ("data",))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        split = nn.with_partitioning(nn.initializers.normal(0.02), (None, "data"))
        x = nn.Dense(16)(jax.nn.one_hot(tokens, 32))
        x = nn.LayerNorm()(x + nn.Dense(16)(nn.gelu(nn.Dense(64, kernel_init=split)(x))))
        return nn.Dense(32)(x)


class Tokens(grain.MapTransform):
    def map(self, number):
        return np.random.default_rng(number).integers(0, 32, 9)


def init(key):
    params = model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
    tx = optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def update(state, tokens):
    def loss_of(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


model = Decoder()
abstract = jax.eval_shape(init, jax.random.PRNGKey(0))
shardings = nn.get_sharding(abstract, mesh)
state = jax.jit(init, out_shardings=shardings)(jax.random.PRNGKey(0))
update = jax.jit(update, out_shardings=(shardings, None), donate_argnames="state")
batches = iter(
    grain.DataLoader(
        data_source=range(4096),
        sampler=grain.IndexSampler(4096, grain.NoSharding(), shuffle=True, num_epochs=1, seed=0),
        operations=[Tokens(), grain.Batch(8)],
    )
)

manager = ocp.CheckpointManager(
    sys.argv[1],
    {
        "state": ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
        "data": ocp.Checkpointer(grain.PyGrainCheckpointHandler()),
    },
    ocp.CheckpointManagerOptions(max_to_keep=3),
)
if (latest := manager.latest_step()) is not None:
    restored = manager.restore(
        latest,
        items={"state": state, "data": batches},
        restore_kwargs={
            "state": {"restore_args": ocp.checkpoint_utils.construct_restore_args(state)}
        },
    )
    state, batches = restored["state"], restored["data"]

for step in range(int(state.step), STEPS):
    if step % EVERY == 0:
        manager.save(step, {"state": state, "data": batches})
    tokens = jax.device_put(next(batches), NamedSharding(mesh, P("data")))
    state, loss = update(state, tokens)
    print("step", step, float(loss))
manager.close()
