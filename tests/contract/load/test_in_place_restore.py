"""Restores that set live objects while they read: one peak of memory, and nothing half old is used."""

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ckpt_core as ckpt
from tests.contract.advice.test_restoring import Refuses
from tests.support import keras_models as km

LAYERS, WIDTH = 12, 512
LEAF_BYTES = WIDTH * WIDTH * 4
STATE_BYTES = LAYERS * LEAF_BYTES
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Model(nnx.Module):
    def __init__(self, value: float):
        self.layers = nnx.List(
            [nnx.Param(jnp.full((WIDTH, WIDTH), value + i)) for i in range(LAYERS)]
        )


def keras_model(value: float) -> Any:
    keras = km.keras
    layers = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    for i, variable in enumerate(model.weights):
        variable.assign(jnp.full((WIDTH, WIDTH), value + i))
    return model


def torch_model(value: float) -> Any:
    torch = pytest.importorskip("torch")
    torch_view = pytest.importorskip("tests.support.torchax_nets").torch_view
    model = torch.nn.Module()
    for i in range(LAYERS):
        model.register_buffer(f"w{i:02}", torch_view(jnp.full((WIDTH, WIDTH), value + i)))
    return model


def arrays(model: Any) -> list[Any]:
    if hasattr(model, "buffers"):
        return [tensor.jax() for tensor in model.buffers()]
    if isinstance(model, Model):
        return [param.get_raw_value() for param in model.layers]
    return [variable.value for variable in model.weights]


def holds(model: Any, value: float) -> bool:
    return all(bool((array == value + i).all()) for i, array in enumerate(arrays(model)))


class Memory:
    """A listener that finds out how much the arrays of jax take at most while a restore runs."""

    def __init__(self) -> None:
        self.most_bytes = 0

    def __call__(self, event: ckpt.Event) -> None:
        now = sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())
        self.most_bytes = max(self.most_bytes, now)


def options(atomic: bool = False, listener: Any = None) -> ckpt.Options:
    # so little at a time that it matters on a model as small as this one
    return ckpt.Options(max_host_bytes=LEAF_BYTES, atomic_restore=atomic, on_event=listener)


def damaged(step: Path) -> None:
    """The last of the arrays is damaged: those before it are read and set by then."""
    last = np.float32(LAYERS - 1 + 100).tobytes() * 1000
    for file in step.rglob("d/*"):
        data = bytearray(file.read_bytes())
        if last in data:
            data[data.index(last) + 2000] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("the last of the arrays is in no file")


kinds = pytest.mark.parametrize("make", [Model, keras_model, torch_model])


@kinds
@pytest.mark.parametrize("atomic", [False, True])
def test_the_old_state_and_the_new_one_are_never_both_in_memory(tmp_path, make, atomic):
    ckpt.save(tmp_path / "step", model=make(100.0))
    model = make(0.0)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())
    memory = Memory()
    ckpt.restore(tmp_path / "step", model=model, options=options(atomic, memory))
    assert holds(model, 100.0)
    extra = memory.most_bytes - before
    if atomic:
        assert extra >= STATE_BYTES - 2 * LEAF_BYTES
    else:
        assert extra <= 4 * LEAF_BYTES


def test_many_small_items_are_no_way_around_it(tmp_path):
    """Each is less than what may wait; what waits of all of them is bounded."""
    items = {f"layer{i}": nnx.Param(jnp.full((WIDTH, WIDTH), 100.0 + i)) for i in range(LAYERS)}
    ckpt.save(tmp_path / "step", items=items)
    targets = {name: nnx.Param(jnp.zeros((WIDTH, WIDTH))) for name in items}
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())
    memory = Memory()
    few = ckpt.Options(max_host_bytes=2 * LEAF_BYTES, on_event=memory)
    ckpt.restore(tmp_path / "step", items=targets, options=few)
    assert all(bool((targets[name][...] == item[...]).all()) for name, item in items.items())
    assert memory.most_bytes - before <= 6 * LEAF_BYTES


@kinds
def test_damage_midway_leaves_nothing_that_could_be_trained(tmp_path, make):
    ckpt.save(tmp_path / "good", model=make(200.0))
    ckpt.save(tmp_path / "bad", model=make(100.0))
    damaged(tmp_path / "bad")
    model = make(0.0)
    with pytest.raises(ckpt.CheckpointCorrupt) as caught:
        ckpt.restore(tmp_path / "bad", model=model, options=options())
    (note,) = caught.value.__notes__
    assert "model held parts of two states" in note and "atomic_restore" in note
    with pytest.raises(RuntimeError, match="deleted"):
        holds(model, 0.0)
    ckpt.restore(tmp_path / "good", model=model, options=options())
    assert holds(model, 200.0)


@kinds
def test_an_atomic_restore_changes_nothing_where_it_fails(tmp_path, make):
    ckpt.save(tmp_path / "bad", model=make(100.0))
    damaged(tmp_path / "bad")
    model = make(0.0)
    with pytest.raises(ckpt.CheckpointCorrupt) as caught:
        ckpt.restore(tmp_path / "bad", model=model, options=options(atomic=True))
    assert not getattr(caught.value, "__notes__", [])
    assert holds(model, 0.0)


@kinds
def test_the_step_before_a_damaged_one_overwrites_its_parts(tmp_path, make):
    with ckpt.Checkpointer(tmp_path, options=options(), asynchronous=False) as checkpointer:
        checkpointer.save(1, model=make(200.0))
        checkpointer.save(2, model=make(100.0))
        damaged(tmp_path / "2")
        model = make(0.0)
        with pytest.warns(RuntimeWarning, match="step 2 is damaged"):
            restored = checkpointer.restore_latest(model=model)
        assert restored is not None and restored.step == 1
    assert holds(model, 200.0)


def test_only_whole_arrays_of_the_object_are_replaced(tmp_path):
    """Whoever else holds an old array keeps it, and a part that is not restored stays."""
    ckpt.save(tmp_path / "step", model=Model(100.0))
    model = Model(0.0)
    old = arrays(model)
    chosen = [f"layers/{i}" for i in range(LAYERS - 1)]
    ckpt.restore(tmp_path / "step", model=model, only=chosen, options=options())
    assert all(bool((array == i).all()) for i, array in enumerate(old))
    assert arrays(model)[-1] is old[-1]
    assert bool((arrays(model)[0] == 100.0).all())


def test_a_mutable_reference_is_not_half_new(tmp_path):
    ckpt.save(tmp_path / "bad", model=Model(100.0))
    damaged(tmp_path / "bad")
    model = Model(0.0)
    model.layers[0] = nnx.Param(jnp.zeros((WIDTH, WIDTH)), ref=True)
    reference = model.layers[0].get_raw_value()
    with contextlib.suppress(ckpt.CheckpointCorrupt):
        ckpt.restore(tmp_path / "bad", model=model, options=options())
    assert bool((reference[...] == 0.0).all())


class Pair(NamedTuple):
    scale: Any
    values: Any


def test_a_variable_that_holds_a_tree_is_set_as_a_whole(tmp_path):
    def made(value: float) -> Model:
        model = Model(value)
        model.moments = nnx.Variable(Pair(jnp.float32(value), jnp.full((WIDTH, WIDTH), value)))
        return model

    ckpt.save(tmp_path / "step", model=made(100.0))
    model = made(0.0)
    ckpt.restore(tmp_path / "step", model=model, options=options())
    assert holds(model, 100.0)
    found = model.moments.get_raw_value()
    assert isinstance(found, Pair) and found.scale == 100.0 and bool((found.values == 100.0).all())


@kinds
def test_what_another_object_refuses_leaves_no_mixture(tmp_path, make):
    """It is set at the end, when most of the model is new and the rest of it is not."""
    ckpt.save(tmp_path / "step", items={"sampler": Refuses(at=1)}, model=make(100.0))
    model = make(0.0)
    arguments: Any = {"items": {"sampler": Refuses(at=0)}, "model": model}
    with pytest.raises(ValueError, match="not today"):
        ckpt.restore(tmp_path / "step", options=options(atomic=True), **arguments)
    assert holds(model, 0.0)
    with pytest.raises(ValueError, match="not today") as caught:
        ckpt.restore(tmp_path / "step", options=options(), **arguments)
    assert "model held parts of two states" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="deleted"):
        holds(model, 0.0)


def test_who_keeps_the_error_keeps_no_old_array(tmp_path):
    """As restore_latest does, while it restores the step before the damaged one."""
    ckpt.save(tmp_path / "good", model=Model(200.0))
    ckpt.save(tmp_path / "bad", model=Model(100.0))
    damaged(tmp_path / "bad")
    model = Model(0.0)
    last = weakref.ref(arrays(model)[-1])
    with pytest.raises(ckpt.CheckpointCorrupt) as caught:
        ckpt.restore(tmp_path / "bad", model=model, options=options())
    assert last() is not None  # what was not replaced is still the model's
    ckpt.restore(tmp_path / "good", model=model, options=options())
    assert holds(model, 200.0) and caught.value.__traceback__ is not None
    assert last() is None


def test_a_deleted_array_is_not_kept(tmp_path):
    ckpt.save(tmp_path / "step", model=Model(100.0))
    model = Model(0.0)
    model.more = nnx.Param(jnp.ones(3))
    model.more.get_raw_value().delete()
    for only in (None, ["layers/**", "more"]):
        with pytest.raises(ckpt.StructureMismatch, match="deleted"):
            ckpt.restore(tmp_path / "step", model=model, missing="keep", only=only)
    ckpt.restore(tmp_path / "step", model=model, only="layers/**")
    assert holds(model, 100.0)
