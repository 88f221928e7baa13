"""Programs for Orbax, with one changed import: killed and resumed, they end with the bits of a whole run; and Keras' own tests."""

import importlib.util
import json
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support.children import compiling_once, with_devices

BEGINNING = """
    import hashlib, os, signal, sys

    class Without:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "orbax":
                raise ModuleNotFoundError(f"no {name} here")

    sys.meta_path.insert(0, Without())
    directory, dies_at = sys.argv[1], int(sys.argv[2])

    import jax
    import numpy as np

    def end(began, tree):
        found = hashlib.sha256()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            found.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
            found.update(np.asarray(leaf).tobytes())
        print(began, found.hexdigest())
"""

# A loop over an NNX model whose arrays are spread over devices; each save goes on while it trains.
NNX = """
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec as P

    from ckpt_orbax import v1 as ocp

    mesh = jax.make_mesh((4,), ("data",))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(8, 64, rngs=rngs)
            self.norm = nnx.BatchNorm(64, rngs=rngs)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)
            self.two = nnx.Linear(64, 8, rngs=rngs)

        def __call__(self, x):
            return self.two(self.dropout(nnx.relu(self.norm(self.one(x)))))

    def spread(leaf):
        sharded = leaf.ndim == 2 and leaf.shape[0] % 4 == 0
        return jax.device_put(leaf, NamedSharding(mesh, P("data") if sharded else P()))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    for part in (model, optimizer):
        nnx.update(part, jax.tree.map(spread, nnx.state(part)))

    @nnx.jit
    def train_step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: ((model(x) - x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    def state():
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}

    training = ocp.training
    with training.Checkpointer(
        directory,
        save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(2),
        preservation_policy=training.preservation_policies.LatestN(2),
    ) as checkpointer:
        began = 0
        if checkpointer.latest is not None:
            abstract = jax.tree.map(ocp.arrays.to_shape_dtype_struct, state())
            loaded = checkpointer.load(abstract_state=abstract)
            nnx.update(model, loaded["model"])
            nnx.update(optimizer, loaded["optimizer"])
            began = checkpointer.latest.step + 1
        for step in range(began, 12):
            x = jnp.asarray(np.random.default_rng(step).normal(size=(16, 8)), jnp.float32)
            loss = train_step(model, optimizer, x)
            checkpointer.save_async(step, state(), metrics={"loss": float(loss)})
            if step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
    end(began, state())
"""

AS_ORBAX = """
    import types

    import ckpt_orbax

    orbax = types.ModuleType("orbax")
    orbax.checkpoint = ckpt_orbax  # no package: nothing else of Orbax can be imported
    sys.modules |= {"orbax": orbax, "orbax.checkpoint": ckpt_orbax}
"""

# Keras' own callback and its own load_model.
KERAS = """
    import keras

    class Death(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

    keras.utils.set_random_seed(0)
    began = 0
    if os.path.isdir(directory):
        model = keras.saving.load_model(directory)
        began = max(int(name) for name in os.listdir(directory) if name.isdigit()) + 1
    else:
        # not a Sequential: Keras loads one into other names, on Orbax as well
        layers = keras.layers
        wide = layers.Dense(32, activation="relu")(given := keras.Input((8,)))
        thin = layers.Dropout(0.3)(layers.BatchNormalization()(wide))
        model = keras.Model(given, layers.Dense(1)(thin))
        model.compile(keras.optimizers.AdamW(1e-2), "mse")
    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 8)), random.normal(size=(64, 1))
    saving = keras.callbacks.OrbaxCheckpoint(directory, max_to_keep=2)
    model.fit(
        x, y, batch_size=16, epochs=6, initial_epoch=began, shuffle=False, verbose=0,
        callbacks=[saving, Death()],
    )
    state = model.get_state_tree(value_format="numpy_array")
    end(began, {name: part for name, part in state.items() if name != "metrics_variables"})
"""

# Keras' own tests of its Orbax callback, with ``ckpt_orbax`` as the module that Keras imports.
SUITE = """
    import json, unittest

    from absl import flags

    flags.FLAGS.mark_as_parsed()
    import keras.src.callbacks.orbax_checkpoint_test as theirs

    suite = unittest.defaultTestLoader.loadTestsFromTestCase(theirs.OrbaxCheckpointTest)
    done = unittest.TextTestRunner(stream=sys.stderr).run(suite)
    bad = {case.id().split(".")[-1].split()[0]: text for case, text in done.failures + done.errors}
    with open(directory, "w") as file:
        json.dump([done.testsRun, bad], file)
    os._exit(0)
"""
NEEDS_TENSORFLOW = {"test_checkpoint_with_assets0", "test_checkpoint_with_assets1"}


def start(program, directory, environment, dies_at=-1):
    code = textwrap.dedent(BEGINNING) + textwrap.dedent(program)
    return subprocess.run(
        [sys.executable, "-c", code, str(directory), str(dies_at)],
        env=environment | {"KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=900,
    )


def run(program, directory, environment, dies_at=-1):
    """Step or epoch at which the program began, and the digest of its last state; None when it died."""
    child = start(program, directory, environment, dies_at)
    if dies_at >= 0:
        assert child.returncode == -signal.SIGKILL, child.stderr
        return None
    assert child.returncode == 0, child.stderr
    began, digest = child.stdout.split()
    return int(began), digest


@pytest.mark.parametrize(
    ("name", "program", "dies_at"),
    [("flax", NNX, 7), ("keras", AS_ORBAX + KERAS, 3)],
    ids=["nnx", "keras"],
)
def test_a_killed_run_ends_where_a_whole_one_ends(tmp_path, name, program, dies_at):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    environment = with_devices(4) | compiling_once(tmp_path / "cache")
    began, whole = run(program, tmp_path / "whole", environment)
    assert began == 0
    run(program, tmp_path / "cut", environment, dies_at)
    began, resumed = run(program, tmp_path / "cut", environment)
    assert 0 < began <= dies_at + 1
    assert resumed == whole


def test_kerass_own_suite(tmp_path):
    pytest.importorskip("absl.testing.parameterized")
    if importlib.util.find_spec("keras") is None:  # importing it would choose its backend
        pytest.skip("keras is not installed")
    answer = tmp_path / "answer.json"
    environment = with_devices(8) | compiling_once(tmp_path / "cache")
    child = start(AS_ORBAX + SUITE, answer, environment | {"TEST_TMPDIR": str(tmp_path)})
    assert answer.exists(), child.stderr
    count, bad = json.loads(answer.read_text())
    assert count >= 22
    unexpected = {name: text for name, text in bad.items() if name not in NEEDS_TENSORFLOW}
    assert not unexpected, "\n".join(unexpected.values())
    assert all("TensorFlow" in bad.get(name, "TensorFlow") for name in NEEDS_TENSORFLOW)
