"""Safetensors and Orbax become checkpoints of ckpt."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import import_weights
from tests.support.same_bits import bits


def test_safetensors_in_several_files(tmp_path: Path) -> None:
    state = {"a": {"w": jnp.ones((64, 8), jnp.bfloat16)}, "b": jnp.arange(512.0), "n": np.arange(3)}
    ckpt.save(tmp_path / "one", state)
    ckpt.convert.export_safetensors(tmp_path / "one", tmp_path / "hub", max_shard_bytes=2048)
    import_weights(tmp_path / "hub", tmp_path / "two", split=".")
    found = ckpt.load(tmp_path / "two")
    assert jax.tree.all(jax.tree.map(lambda a, b: bits(a) == bits(b), found, state))
    assert isinstance(found["b"], jax.Array)


def test_a_tree_of_orbax(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    state = {"w": jnp.arange(6.0), "layers": [np.arange(3), 2.5], "name": "text", "step": 7}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", state)
    import_weights(tmp_path / "orbax", tmp_path / "one")
    one, other = ckpt.load(tmp_path / "one"), ckpt.load(tmp_path / "orbax")
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert bits(one["w"]) == bits(state["w"])
    assert (one["name"], one["step"], one["layers"][1]) == ("text", 7, 2.5)
    assert ckpt.verify(tmp_path / "one").ok
