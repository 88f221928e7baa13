"""Keras objects as items, and models out of directories, Keras' own and ours; meshes; other backends."""

import errno
import functools
import importlib

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_keras
from tests.support import keras_models as km
from tests.support.keras_models import OF_ORBAX, OrbaxCheckpointCallback, keras, layers, load_model
from tests.support.refusals import refuse

compiled_once, pytestmark = km.compiled_once, km.QUIET
mlp = functools.partial(km.small, norm=True)


def round_trip(tmp_path, model, other, **arguments):
    ckpt.save(tmp_path / "step", model=model)
    return ckpt.restore(tmp_path / "step", model=other, **arguments).report


def test_a_sound_model_is_saved_as_keras_own_state_tree(tmp_path):
    model = mlp()
    km.scramble(model)
    tree = model.get_state_tree()
    ckpt.save(tmp_path / "step", model=model)
    loaded = ckpt.load(tmp_path / "step")["model"]
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    km.assert_same(
        [*map(np.asarray, jax.tree.leaves(loaded))], [*map(np.asarray, jax.tree.leaves(tree))]
    )


def test_a_model_follows_what_a_trainer_publishes(tmp_path):
    trained, live, follower = mlp(0), mlp(1), ckpt.Follower(tmp_path)
    with ckpt.Publisher(tmp_path) as publisher:
        for version in range(3):
            trained.weights[version].assign_add(trained.weights[version] + 1)
            publisher.publish(version, model=trained)
            assert follower.update(model=live, timeout_secs=60) == version
            km.assert_same(km.values(live), km.values(trained))
    assert [*tmp_path.glob(".ckpt-delta-2-*")]


def test_adam_is_adam_7_but_never_sgd(tmp_path):
    model = mlp(0, keras.optimizers.Adam(name="adam"))
    km.scramble(model)
    other = mlp(1, keras.optimizers.Adam(name="adam_7"))
    round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))
    lion = mlp(1, keras.optimizers.Lion())
    sgd = mlp(2, keras.optimizers.SGD(momentum=0.9))
    before = km.values(sgd)
    ckpt.save(tmp_path / "lion", model=lion)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "lion", model=sgd)
    assert "lion" in str(caught.value) and "sgd" in str(caught.value)
    km.assert_same(before, km.values(sgd))


OPTIMIZERS = {
    "adafactor": lambda: keras.optimizers.Adafactor(),
    "nadam": lambda: keras.optimizers.Nadam(),
    "muon": lambda: keras.optimizers.Muon(),
    "lion": lambda: keras.optimizers.Lion(),
    "ftrl": lambda: keras.optimizers.Ftrl(),
    "ema": lambda: keras.optimizers.Adam(use_ema=True),
    "accumulation": lambda: keras.optimizers.SGD(momentum=0.9, gradient_accumulation_steps=4),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    ),
    "rmsprop": lambda: keras.optimizers.RMSprop(momentum=0.5, centered=True),
    "adamw": lambda: keras.optimizers.AdamW(amsgrad=True),
}
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
    OPTIMIZERS["schedule_free"] = lambda: keras.optimizers.ScheduleFreeAdamW()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_bitwise(tmp_path, name):
    """Saved after an epoch, restored into a model of other names, and trained on: the same bits."""
    model = km.trained(km.small(0, OPTIMIZERS[name]()), shuffle=False)
    ckpt.save(tmp_path / "step", model=model)
    other = km.small(1, OPTIMIZERS[name]())
    ckpt.restore(tmp_path / "step", model=other)
    km.assert_same(km.values(model), km.values(other))
    if name == "ema":
        # the end of fit puts one buffer into weight and average, and Keras' next one donates both
        for average in model.optimizer._model_variables_moving_average:
            average.assign(np.array(average.value))
    km.fit(model, shuffle=False)
    km.fit(other, shuffle=False)
    km.assert_same(km.values(model), km.values(other))


def test_equal_names_of_layers_and_variables_are_distinguished(tmp_path):
    @keras.saving.register_keras_serializable("ckpt_tests")
    class Twins(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.one = layers.Dense(4, name="d")
            self.two = layers.Dense(4, name="d")
            self.inner = layers.Dense(4, name="k")

        def build(self, shape):
            self.k = self.add_weight(name="k", shape=(4,))
            for layer in (self.one, self.two, self.inner):
                layer.build(shape)

        def call(self, x):
            return self.inner(self.two(self.one(x))) * self.k

    def make(seed):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((4,)), Twins(name="twins"), layers.Dense(2)])
        model.compile("adam", "mse")
        return model

    model, other = make(0), make(1)
    with pytest.raises((ValueError, TypeError)):
        model.get_state_tree()
    km.scramble(model)
    report = round_trip(tmp_path, model, other)
    assert len(set(report.loaded)) == len(km.values(model, metrics=True))
    km.assert_same(km.values(model), km.values(other))


def test_metrics_that_do_not_fit_are_left_alone(tmp_path):
    model, other = mlp(0, metrics=["mae", "mse"]), mlp(1, metrics=["mae"])
    km.fit(model)
    km.fit(other)
    running = [np.array(v.value) for v in other.metrics_variables]
    round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))
    km.assert_same(running, [np.array(v.value) for v in other.metrics_variables])


def frozen(seed, *, trainable):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="base"), layers.Dense(2, name="head")], name="net"
    )
    model.get_layer("base").trainable = trainable
    model.compile(keras.optimizers.Adam(name="adam"), "mse")
    return model


@pytest.mark.parametrize("saved_trainable", [True, False])
def test_freezing_moves_no_weight_out_of_sight(tmp_path, saved_trainable):
    model = frozen(0, trainable=saved_trainable)
    other = frozen(1, trainable=not saved_trainable)
    ckpt.save(tmp_path / "step", model=model)
    before = km.values(other)
    with pytest.raises(ckpt.StructureMismatch) as caught:  # the optimizer has other slots now
        ckpt.restore(tmp_path / "step", model=other)
    assert all("optimizer_variables" in m.path for m in caught.value.mismatches)
    km.assert_same(before, km.values(other))
    ckpt.restore(tmp_path / "step", model=other, only=["*trainable_variables/**"])
    km.assert_same(
        [np.array(v.value) for v in model.variables], [v.numpy() for v in other.variables]
    )


def test_uncompiled_model_has_weights_only(tmp_path):
    model, other = mlp(0, None), mlp(1, None)
    with pytest.raises(AttributeError):
        model.get_state_tree()
    round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))
    compiled = mlp(2)
    before = km.values(compiled)
    with pytest.raises(ckpt.StructureMismatch, match="adam"):
        ckpt.restore(tmp_path / "step", model=compiled)
    km.assert_same(before, km.values(compiled))


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_precision_policies_come_back_bitwise(tmp_path, policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model, other = mlp(0), mlp(1)
        km.scramble(model)
    finally:
        keras.config.set_dtype_policy(before)
    report = round_trip(tmp_path, model, other)
    assert any("loss_scale" in path for path in report.loaded) == (policy == "mixed_float16")
    km.assert_same(km.values(model), km.values(other))


def test_int8_layers_come_back_bitwise_and_never_as_floats(tmp_path):
    model, other = mlp(0, None), mlp(1, None)
    float_model = mlp(2, None)
    for each in (model, other):
        for layer in each.layers:
            if isinstance(layer, layers.Dense):
                layer.quantize("int8")
    assert any(v.dtype == "int8" for v in model.variables)
    round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))
    with pytest.raises(ckpt.StructureMismatch, match="int8"):
        ckpt.restore(tmp_path / "step", model=float_model)


def test_parts_of_a_model_are_items_too(tmp_path):
    """Beside those of the suite of conformance: a weight, a layer."""
    weight, other = (keras.Variable(np.full((2, 2), i, "f4"), name="w") for i in (1, 0))
    layer, fresh = layers.Dense(2), layers.Dense(2)
    for each in (layer, fresh):
        each.build((None, 3))
    ckpt.save(tmp_path / "step", weight=weight, layer=layer)
    ckpt.restore(tmp_path / "step", weight=other, layer=fresh)
    assert other.numpy().tolist() == weight.numpy().tolist()
    km.assert_same(*([np.array(v.value) for v in each.variables] for each in (layer, fresh)))


def run(directory, *, seed=0, epochs=3, **arguments):
    model = km.small(seed)
    km.fit(model, [OrbaxCheckpointCallback(directory, **arguments)], epochs=epochs)
    return model


def test_any_step_is_a_model_again(tmp_path):
    seen = {}

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen[epoch] = km.values(self.model)

    model = km.trained(km.small(), [Look(), OrbaxCheckpointCallback(tmp_path)], epochs=3)
    for step in (0, 1, 2):
        km.assert_same(km.values(load_model(tmp_path, step=step)), seen[step])
    loaded = load_model(tmp_path)
    km.assert_same(km.values(loaded), seen[2])
    assert loaded.loss == "mse" and type(loaded.optimizer) is keras.optimizers.Adam
    x, _ = km.data()
    km.assert_same([loaded.predict(x, verbose=0)], [model.predict(x, verbose=0)])
    km.assert_same(km.values(load_model(tmp_path / "1")), seen[1])  # the step itself
    weights = load_model(tmp_path, compile=False)
    assert getattr(weights, "optimizer", None) is None
    km.assert_same(km.values(weights), seen[2][: len(model.variables)])


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(ckpt.CheckpointNotFound, match="nothing"):
        load_model(tmp_path / "nothing")
    run(tmp_path / "run", epochs=2)
    with pytest.raises(ckpt.CheckpointNotFound, match=r"no step 7; it has: 0, 1"):
        load_model(tmp_path / "run", step=7)
    ckpt.save(tmp_path / "other", state={"a": np.ones(2)})
    with pytest.raises(ckpt.CheckpointNotFound, match="no Keras model: items are state"):
        load_model(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        ckpt_keras.restore(tmp_path / "nothing", km.small())


def test_a_model_without_configuration_says_why(tmp_path):
    class Net(keras.Model):
        def __init__(self, width):
            super().__init__()
            self.dense = keras.layers.Dense(width)

        def call(self, x):
            return self.dense(x)

        def get_config(self):
            raise NotImplementedError("no configuration here")

    x, _ = km.data()
    model = Net(2)
    model(x)
    ckpt_keras.save(tmp_path, model, step=0)
    with pytest.raises(ckpt.CheckpointNotFound, match=r"no configuration here.*ckpt_keras.restore"):
        load_model(tmp_path)
    other = Net(2)
    other(x)
    ckpt_keras.restore(tmp_path, other)
    km.assert_same(km.values(model), km.values(other))


def test_save_and_restore_by_hand(tmp_path):
    model, other = km.small(0), km.small(1)
    km.scramble(model)
    path = ckpt_keras.save(tmp_path / "run", model, step=3, metrics={"loss": 1.5})
    assert path == str(tmp_path / "run" / "3")
    assert ckpt.Checkpointer(tmp_path / "run").metrics(3) == {"loss": 1.5}
    with pytest.raises(ckpt.CheckpointExists):
        ckpt_keras.save(tmp_path / "run", model, step=3)
    ckpt_keras.save(tmp_path / "run", model, step=3, overwrite=True)
    restored = ckpt_keras.restore(tmp_path / "run", other)
    assert restored.step == 3 and restored.report.missing == restored.report.unexpected == ()
    km.assert_same(km.values(model), km.values(other))
    one = ckpt_keras.save(tmp_path / "one", model, what="weights")
    third = km.small(2)
    ckpt_keras.restore(one, third, what="weights")
    km.assert_same(
        km.values(model)[: len(model.variables)], km.values(third)[: len(model.variables)]
    )
    with pytest.raises(ValueError, match="'all' or 'weights'"):
        ckpt_keras.restore(one, third, what="optimizer")


@OF_ORBAX
@pytest.mark.parametrize("functional", [False, True])
def test_checkpoints_of_keras_own_callback_are_resumed(tmp_path, functional, monkeypatch):
    ocp = pytest.importorskip("orbax.checkpoint")
    # once anybody has imported orbax.checkpoint.multihost, Keras' callback finds that in place of this
    found = importlib.import_module("orbax.checkpoint._src.multihost.multihost")
    monkeypatch.setattr(ocp, "multihost", found)

    def make(seed):
        if not functional:
            return km.small(seed)
        keras.utils.set_random_seed(seed)
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(3)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dropout(0.3)(hidden)))
        model.compile("adam", "mse", metrics=["mae"])
        return model

    model = make(0)
    km.fit(model, [keras.callbacks.OrbaxCheckpoint(tmp_path, max_to_keep=3)], epochs=2)
    km.assert_same(km.values(model), km.values(load_model(tmp_path)))
    assert [*map(int, sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()))] == [0, 1]
    assert km.differ(km.values(model), km.values(load_model(tmp_path, step=0)))
    other = make(1)
    ckpt_keras.restore(tmp_path, other)
    km.assert_same(km.values(model), km.values(other))
    # and the run goes on in the same directory, with our callback
    history = km.fit(make(2), [OrbaxCheckpointCallback(tmp_path)], epochs=3)
    assert history.epoch == [2]
    assert load_model(tmp_path, step=2).optimizer.iterations == 18


@OF_ORBAX
def test_orbax_reads_ours(tmp_path):
    """Adafactor, whose variables have one name: ours are distinguished in a way that Orbax can read."""
    ocp = pytest.importorskip("orbax.checkpoint")
    km.fit(km.small(0, "adafactor"), [OrbaxCheckpointCallback(tmp_path)])
    expected = ckpt.load(tmp_path / "0")["pytree"]
    with ocp.CheckpointManager(tmp_path) as manager:
        found = manager.restore(0)["pytree"]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    km.assert_same(
        [*map(np.asarray, jax.tree.leaves(found))], [*map(np.asarray, jax.tree.leaves(expected))]
    )


def layout(name):
    distribution = keras.distribution
    devices = distribution.list_devices()
    if name == "none":
        return None
    if name.startswith("data"):
        return distribution.DataParallel(devices=devices[: int(name[4:])])
    mesh = distribution.DeviceMesh((2, 4), ["batch", "model"], devices)
    places = distribution.LayoutMap(mesh)
    places[".*wide/kernel"] = (None, "model")
    places[".*wide/bias"] = ("model",)
    return distribution.ModelParallel(layout_map=places, batch_dim_name="batch")


def wide(seed):
    keras.utils.set_random_seed(seed)
    parts = [layers.Dense(8, name="wide"), layers.Dropout(0.2), layers.Dense(2, name="out")]
    model = keras.Sequential([keras.Input((4,)), *parts])
    model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.fixture
def on_layout():
    """Sets a distribution for the test and takes it away after it."""
    yield lambda name: keras.distribution.set_distribution(layout(name))
    keras.distribution.set_distribution(None)


PAIRS = [
    ("data8", "model"),
    ("model", "none"),
    ("none", "data4"),
    ("data8", "data2"),
    ("model", "data8"),
    ("none", "model"),
]


@pytest.mark.parametrize(("saved", "wanted"), PAIRS)
@pytest.mark.filterwarnings("ignore:jax.sharding:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:nothing is trained:UserWarning")
def test_saved_on_one_layout_restored_on_another(tmp_path, on_layout, saved, wanted):
    on_layout(saved)
    model = wide(0)
    km.fit(model, [OrbaxCheckpointCallback(tmp_path)])
    expected = km.values(model)
    on_layout(wanted)
    other = wide(1)
    fresh = {v.path: v.value.sharding for v in other.variables}
    history = km.fit(other, [OrbaxCheckpointCallback(tmp_path)])
    assert history.epoch == []  # restored, and nothing left to train
    km.assert_same(km.values(other), expected)
    if wanted == "model":
        assert "model" in fresh[other.get_layer("wide").kernel.path].spec
    for variable in other.variables:
        assert variable.value.sharding.is_equivalent_to(fresh[variable.path], variable.ndim)
    for variable in other.optimizer.variables:
        assert len(variable.value.sharding.device_set) == len(
            other.variables[0].value.sharding.device_set
        )
    km.fit(other, [OrbaxCheckpointCallback(tmp_path)], epochs=2)  # and it trains
    loaded = load_model(tmp_path, step=0)
    km.assert_same(km.values(loaded), expected)
    kernel = loaded.get_layer("wide").kernel.value
    assert kernel.sharding.is_equivalent_to(other.get_layer("wide").kernel.value.sharding, 2)


TORCH = """
import sys, json, numpy as np, keras, ckpt_core as ckpt, ckpt_keras
directory = sys.argv[1]
def make(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    return model
x, y = np.ones((8, 4), "f4"), np.ones((8, 2), "f4")
try:
    ckpt_keras.OrbaxCheckpointCallback(directory)
    said = None
except RuntimeError as error:
    said = str(error)
model = make(0)
callback = ckpt_keras.OrbaxCheckpointCallback(directory, host_only=True)
model.fit(x, y, epochs=2, verbose=0, callbacks=[callback])
other = make(1)
callback = ckpt_keras.OrbaxCheckpointCallback(directory, host_only=True)
history = other.fit(x, y, epochs=2, verbose=0, callbacks=[callback])
host = lambda m: [keras.ops.convert_to_numpy(v.value) for v in m.variables + m.optimizer.variables]
same = all((a == b).all() for a, b in zip(host(model), host(other)))
print(json.dumps([said, history.epoch, same]))
"""


def test_another_backend_is_answered_in_one_sentence(tmp_path, run_python):
    pytest.importorskip("torch")
    said, epochs, same = run_python(TORCH, str(tmp_path), KERAS_BACKEND="torch")
    assert "the active backend is 'torch'" in said and "KERAS_BACKEND=jax" in said
    assert "host_only=True" in said
    assert epochs == [] and same


def test_ckpt_keras_imports_keras_late_and_names_the_backend_to_set(run_python):
    code = "import json, ckpt_core, ckpt_keras, sys; assert 'keras' not in sys.modules\n"
    code += "try:\n    import tensorflow\n    told = 'there'\nexcept ImportError:\n    pass\n"
    code += "try:\n    ckpt_keras.OrbaxCheckpointCallback\nexcept ModuleNotFoundError as e:\n    told = str(e)\n"
    told = run_python(code + "print(json.dumps(told))", KERAS_BACKEND="tensorflow")
    assert told == "there" or "Set KERAS_BACKEND=jax before Keras is imported" in told


@pytest.mark.parametrize(
    "call", [load_model, lambda path: ckpt_keras.restore(path, km.small())], ids=["load", "restore"]
)
def test_a_directory_that_cannot_be_looked_at(tmp_path, monkeypatch, call):
    refuse(monkeypatch, tmp_path, errno.EIO, calls=("stat",), below=False)
    with pytest.raises(OSError) as raised:
        call(tmp_path)
    assert raised.value.errno == errno.EIO


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
def test_a_fit_in_a_directory_that_cannot_be_looked_at(tmp_path, monkeypatch, number):
    refuse(monkeypatch, tmp_path, number, calls=("stat", "lstat"), below=False)
    with pytest.raises(OSError) as raised:
        run(tmp_path)
    assert raised.value.errno == number
