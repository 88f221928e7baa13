"""``load_async`` loads with the 64-bit types and the default device of the thread that called it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt


def test_wide_types_of_the_caller(tmp_path):
    with jax.enable_x64(True):
        ckpt.save(tmp_path / "a", {"w": jnp.arange(3, dtype=jnp.float64)})
        pending = ckpt.load_async(tmp_path / "a")
    loaded = pending.result()["w"]
    assert loaded.dtype == np.float64
    pending = ckpt.load_async(tmp_path / "a")
    with pytest.raises(ckpt.CheckpointError, match="64-bit"):
        pending.result()


def test_the_default_device_of_the_caller(tmp_path):
    ckpt.save(tmp_path / "a", {"w": np.ones(3, np.float32), "x": jnp.ones(3)})
    device = jax.devices()[3]
    with jax.default_device(device):
        pending = ckpt.load_async(
            tmp_path / "a", {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, unexpected="ignore"
        )
    assert pending.result()["w"].devices() == {device}
