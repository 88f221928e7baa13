"""Trains as RecML's KerasTrainer does: a class made of CheckpointManager, and epochs as steps."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

EPOCHS, tx = 12, optax.adam(1e-2)


class KerasManager(ocp.CheckpointManager):
    def __init__(self, directory, max_to_keep=5, every=1):
        super().__init__(
            directory=directory,
            checkpointers=ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
            options=ocp.CheckpointManagerOptions(every, max_to_keep=max_to_keep),
        )

    def save_variables(self, model, epoch, logs):
        self.save(step=epoch, items=model.variables, metrics=logs)

    def restore_variables(self, model, epoch):
        state, model.variables = model.variables, None
        restore_args = jax.tree.map(restore_args_of, state)
        args = ocp.args.PyTreeRestore(state, transforms={}, restore_args=restore_args)
        model.variables = self.restore(step=epoch, args=args, directory=str(self.directory))
        model.initial_epoch = epoch + 1


def restore_args_of(value):
    return ocp.type_handlers.ArrayRestoreArgs(
        restore_type=jax.Array, sharding=value.sharding, global_shape=value.shape, dtype=value.dtype
    )


class Checkpoint:
    def __init__(self, manager):
        self.manager = manager

    def on_train_begin(self, model):
        if (latest := self.manager.latest_step()) is not None:
            self.manager.restore_variables(model, latest)

    def on_epoch_end(self, model, epoch, logs):
        self.manager.save_variables(model, epoch, logs)

    def on_train_end(self):
        self.manager.wait_until_finished()


class Model:
    def __init__(self):
        table, head = (jax.random.normal(jax.random.key(0), shape) for shape in ((64, 8), (32, 1)))
        trained = [table, head / 6, jnp.zeros(1)]
        self.variables = trained, [jax.random.PRNGKey(1)], jax.tree.leaves(tx.init(trained))
        self.initial_epoch = 0

    def fit(self, users, clicked, callback):
        callback.on_train_begin(self)
        for epoch in range(self.initial_epoch, EPOCHS):
            self.variables, loss = train(self.variables, users, clicked)
            print("step", epoch, float(loss))
            callback.on_epoch_end(self, epoch, {"loss": float(loss)})
        callback.on_train_end()


@jax.jit
def train(variables, users, clicked):
    trained, (seed,), optimizer = variables
    seed, dropout = jax.random.split(seed)

    def loss_of(trained):
        seen = jax.nn.relu(trained[0][users].reshape(len(users), -1))
        seen *= jax.random.bernoulli(dropout, 0.8, seen.shape) / 0.8
        logits = (seen @ trained[1] + trained[2])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, clicked).mean()

    loss, grads = jax.value_and_grad(loss_of)(trained)
    state = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(tx.init, trained)), optimizer)
    updates, state = tx.update(grads, state)
    trained = optax.apply_updates(trained, updates)
    return (trained, [seed], jax.tree.leaves(state)), loss


model = Model()
users = np.random.default_rng(0).integers(0, 64, (64, 4))
model.fit(users, users.sum(1) % 2, Checkpoint(KerasManager(sys.argv[1])))
