"""msgpack files of Flax: every array to the bit; damage and what is no tree of arrays is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import import_weights
from tests.support.same_bits import bits

serialization = pytest.importorskip("flax.serialization")

ARRAYS: dict[str, Any] = {
    "w": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
    "f8": jnp.ones(3, jnp.float8_e4m3fn),
    "wide": np.arange(3.0),
    "flags": np.array([True, False]),
    "none": np.zeros((0, 4), np.float32),
    "zero": np.array(7, np.uint8),
    "complex": np.array([1j], np.complex64),
}


def test_every_array_and_number(tmp_path: Path) -> None:
    tree = {
        "params": {"dense": ARRAYS},
        "steps": [1, -1, 200, 70_000, 2**40, -(2**40), 1.5, True, None, "text", 2 - 1j],
        "scalar": np.float32(3),
        "long": {f"k{n}": n for n in range(20)},
        "text": "x" * 70_000,
    }
    (tmp_path / "a").write_bytes(serialization.msgpack_serialize(tree))
    import_weights(tmp_path / "a", tmp_path / "c")
    found = ckpt.load(tmp_path / "c")
    assert jax.tree.map(bits, found["params"]["dense"]) == jax.tree.map(bits, ARRAYS)
    assert found["steps"] == tree["steps"]
    assert (found["long"], found["text"]) == (tree["long"], tree["text"])
    assert bits(np.asarray(found["scalar"])) == bits(np.asarray(np.float32(3)))


def test_arrays_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 64)
    tree = {"a": {"big": np.arange(60, dtype=np.float32).reshape(5, 12)}, "b": np.ones(2, np.int8)}
    (tmp_path / "a.msgpack").write_bytes(serialization.msgpack_serialize(tree))
    assert b"chunked" in (tmp_path / "a.msgpack").read_bytes()
    import_weights(tmp_path / "a.msgpack", tmp_path / "c")
    found = ckpt.load(tmp_path / "c")
    assert bits(found["a"]["big"]) == bits(tree["a"]["big"])
    assert bits(found["b"]) == bits(tree["b"])


def test_a_train_state_of_linen_goes_on(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    linen = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")
    model = linen.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
    (tmp_path / "checkpoint_1").write_bytes(serialization.to_bytes(state))
    import_weights(tmp_path / "checkpoint_1", tmp_path / "c")
    again = serialization.from_state_dict(state, ckpt.load(tmp_path / "c"))
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_damage_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    whole = serialization.msgpack_serialize(
        {"a": np.arange(40.0), "b": {"c": "text", "d": 1 << 40}}
    )
    file = tmp_path / "a.msgpack"
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"a\.msgpack"):
        import_weights(file, tmp_path / "c")
    file.write_bytes(b"\x81\xa1a\xd4\x09\x00")  # an extension that is not Flax's
    with pytest.raises(ckpt.UnsupportedLeaf, match="a is a ExtType"):
        import_weights(file, tmp_path / "c")
    assert not (tmp_path / "c").exists()
