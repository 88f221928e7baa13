"""What was saved decides kinds: an array stays an array of its dtype, whatever stands in the target."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt

SAVED: dict[str, Any] = {
    "strong": jnp.asarray(np.float32(1.5)),
    "bfloat16": jnp.bfloat16(0.1),
    "weak": jnp.asarray(1.5),
    "count": jnp.int32(7),
    "weak count": jnp.asarray(7),
    "flag": jnp.asarray(True),
    "complex": jnp.asarray(np.complex64(1 + 2j)),
    "small int": jnp.int8(3),
    "numpy": np.array(2.5, np.float64),
    "numpy half": np.array(2.5, np.float16),
    "big-endian": np.array(3, ">i4"),
    "scalar": np.float32(0.1),
    "int scalar": np.uint8(200),
    "python float": 0.25,
    "python int": 3,
    "python bool": True,
    "beyond 64 bits": 2**70,
}


def number_for(value: Any) -> Any:
    """The Python number that a fresh state has where the trained one has this."""
    return {"f": 0.0, "V": 0.0, "i": 0, "u": 0, "b": False, "c": 0j, "O": 0}[
        np.asarray(value).dtype.kind
    ]


def assert_alike(got: Any, saved: Any) -> None:
    assert isinstance(got, jax.Array) == isinstance(saved, jax.Array)
    if not isinstance(saved, jax.Array):
        assert type(got) is type(saved)
    if isinstance(saved, (jax.Array, np.ndarray, np.generic)):
        assert got.dtype == saved.dtype and got.shape == saved.shape
        assert getattr(got, "weak_type", None) == getattr(saved, "weak_type", None)
        assert getattr(got, "committed", None) == getattr(saved, "committed", None)
    assert np.asarray(got).tobytes() == np.asarray(saved).tobytes() or got == saved


@pytest.mark.parametrize("name", SAVED)
def test_a_python_number_in_the_target_takes_what_was_saved(tmp_path, name):
    saved = SAVED[name]
    ckpt.save(tmp_path / "a", {"x": saved})
    target = {"x": number_for(saved)}
    assert_alike(ckpt.load(tmp_path / "a", target)["x"], saved)
    assert_alike(ckpt.restore(tmp_path / "a", state=target)["state"]["x"], saved)
    assert_alike(ckpt.load(tmp_path / "a")["x"], saved)


def test_it_comes_to_lie_where_its_neighbours_lie(tmp_path, mesh):
    """A step that is compiled for a mesh refuses a scalar that is bound to one device."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = {"w": jnp.ones((8, 4)), "step": jnp.int32(3)}
    state = jax.device_put(state, everywhere)
    ckpt.save(tmp_path / "a", state)
    got = ckpt.load(tmp_path / "a", {"w": state["w"], "step": 0})
    assert got["step"].sharding == everywhere
    jax.jit(lambda s: s["w"] * s["step"])(got)


def test_a_cast_that_was_asked_for_keeps_an_array(tmp_path):
    ckpt.save(tmp_path / "a", {"jax": jnp.int32(3), "numpy": np.array(3, np.int32)})
    target = {"jax": 0.0, "numpy": 0.0}
    with pytest.raises(ckpt.StructureMismatch, match="cast=True"):
        ckpt.load(tmp_path / "a", target)
    got = ckpt.load(tmp_path / "a", target, cast=True)
    assert isinstance(got["jax"], jax.Array) and got["jax"].dtype == jnp.float32
    assert isinstance(got["numpy"], np.ndarray) and got["numpy"].dtype == np.float64


def test_another_kind_of_number_is_still_refused(tmp_path):
    ckpt.save(tmp_path / "a", {"x": jnp.int32(3), "y": jnp.ones(2)})
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.load(tmp_path / "a", {"x": True, "y": 1.0})
    assert [(one.path, one.kind) for one in caught.value.mismatches] == [
        ("x", "dtype"),
        ("y", "shape"),
    ]


def test_an_array_in_the_target_takes_a_saved_python_number(tmp_path):
    """The other way round the target decides, as it does between jax and numpy."""
    ckpt.save(tmp_path / "a", {"x": 0.5, "n": 3})
    got = ckpt.load(tmp_path / "a", {"x": jnp.zeros((), jnp.bfloat16), "n": np.zeros((), np.int8)})
    assert (got["x"].dtype, got["n"].dtype) == (jnp.bfloat16, np.int8)
    ckpt.save(tmp_path / "b", {"n": 300})
    with pytest.raises(ckpt.StructureMismatch, match="300"):
        ckpt.load(tmp_path / "b", {"n": np.zeros((), np.int8)})


def train(state: dict[str, Any], steps: range) -> tuple[dict[str, Any], list[Any]]:
    """A loop in bfloat16 whose scale begins as a Python number and becomes an array."""

    @jax.jit
    def step(state: dict[str, Any], x: Any) -> tuple[dict[str, Any], Any]:
        loss = jnp.sum((x * state["scale"]) * state["w"])
        return {"w": state["w"] * 0.99 + x, "scale": state["scale"] + 0.001}, loss

    losses: list[Any] = []
    for number in steps:
        x = jnp.linspace(0, 1, 32, dtype=jnp.bfloat16) + jnp.bfloat16(number / 8)
        state, loss = step(state, x)
        losses.append(np.asarray(loss).tobytes())
    return state, losses


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), jnp.float32(0.5)], ids=str)
def test_losses_after_a_resume_are_the_same_bits(tmp_path, scale):
    def fresh() -> dict[str, Any]:
        return {"w": jnp.ones(32, jnp.bfloat16), "scale": 0.5}

    begun, _ = train(fresh() | {"scale": scale}, range(4))
    ckpt.save(tmp_path / "a", begun)
    _, expected = train(begun, range(4, 12))
    restored = ckpt.restore(tmp_path / "a", state=fresh())["state"]
    _, losses = train(restored, range(4, 12))
    assert losses == expected
    _, losses = train(ckpt.load(tmp_path / "a", fresh()), range(4, 12))
    assert losses == expected


def test_a_variable_of_nnx_that_begins_as_a_number(tmp_path):
    class Module(nnx.Module):
        def __init__(self) -> None:
            self.count = nnx.Variable(0)

    trained, fresh = Module(), Module()
    trained.count.set_value(jnp.int32(5))
    ckpt.save(tmp_path / "a", model=trained)
    ckpt.restore(tmp_path / "a", model=fresh)
    assert_alike(fresh.count.get_raw_value(), jnp.int32(5))
