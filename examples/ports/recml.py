"""Trains as RecML's KerasTrainer does: a class made of CheckpointManager, and epochs as steps."""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
import orbax.checkpoint as ocp


class KerasManager(ocp.CheckpointManager):
    def __init__(self, directory, max_to_keep=5, save_interval_epochs=1):
        super().__init__(
            directory=directory,
            checkpointers=ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
            options=ocp.CheckpointManagerOptions(
                save_interval_steps=save_interval_epochs, max_to_keep=max_to_keep
            ),
        )

    def save_variables(self, model, epoch, logs):
        self.save(step=epoch, items=state_of(model), metrics=logs)

    def restore_variables(self, model, epoch):
        state = state_of(model, purge_model_variables=True)
        model._jax_state_synced = False
        restore_args = jax.tree.map(restore_args_of, state)
        args = ocp.args.PyTreeRestore(state, transforms={}, restore_args=restore_args)
        restored = self.restore(step=epoch, args=args, directory=str(self.directory))
        model._initial_epoch = epoch + 1
        names = ("trainable_variables", "non_trainable_variables", "optimizer_variables")
        model._jax_state = dict(zip(names, restored))
        model.jax_state_sync()


def state_of(model, **how):
    return model._get_jax_state(
        trainable_variables=True, non_trainable_variables=True, optimizer_variables=True, **how
    )


def restore_args_of(value):
    return ocp.type_handlers.ArrayRestoreArgs(
        restore_type=jax.Array,
        sharding=value.sharding,
        global_shape=value.shape,
        dtype=value.dtype,
    )


class Checkpoint(keras.callbacks.Callback):
    def __init__(self, manager):
        super().__init__()
        self.manager = manager

    def on_train_begin(self, logs=None):
        if (latest := self.manager.latest_step()) is not None:
            self.manager.restore_variables(self.model, latest)

    def on_epoch_end(self, epoch, logs=None):
        self.manager.save_variables(self.model, epoch, logs)

    def on_train_end(self, logs=None):
        self.manager.wait_until_finished()


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((4,), dtype="int32"),
        keras.layers.Embedding(64, 8),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile("adam", "binary_crossentropy")
model.optimizer.build(model.trainable_variables)
users = np.random.default_rng(0).integers(0, 64, (64, 4))
say = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: print("step", epoch, logs["loss"])
)
callbacks = [say, Checkpoint(KerasManager(sys.argv[1]))]
model.fit(users, users.sum(1) % 2, 32, 12, 0, callbacks, shuffle=False)
