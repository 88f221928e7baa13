"""Files of ``equinox.tree_serialise_leaves``: with a target's names and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import import_weights
from tests.support.same_bits import bits

eqx = pytest.importorskip("equinox")


def model(seed: int) -> Any:
    mlp = eqx.nn.MLP(2, 3, 4, 2, key=jax.random.key(seed))
    return (
        mlp,
        {"z": jnp.ones(2, jnp.bfloat16), "a": 3, "rate": 0.5, "on": True},
        np.arange(3, dtype=np.float32),
    )


def test_a_model_by_its_names(tmp_path: Path) -> None:
    saved = model(0)
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", saved)
    import_weights(tmp_path / "m.eqx", tmp_path / "c", like=model(1))
    found = ckpt.load(tmp_path / "c", model(2))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(saved), strict=True):
        if eqx.is_array(one):
            assert bits(np.asarray(one)) == bits(np.asarray(other))
        else:
            assert one == other
    abstract = eqx.filter_eval_shape(model, 0)
    import_weights(tmp_path / "m.eqx", tmp_path / "d", like=abstract)
    assert bits(ckpt.load(tmp_path / "d", model(2))[1]["z"]) == bits(saved[1]["z"])


def test_hyperparameters_and_no_target(tmp_path: Path) -> None:
    with open(tmp_path / "m.eqx", "wb") as file:
        file.write((json.dumps({"width": 4}) + "\n").encode())
        eqx.tree_serialise_leaves(file, [jnp.arange(4, dtype=jnp.bfloat16), np.arange(2)])
    import_weights(tmp_path / "m.eqx", tmp_path / "c")
    found = ckpt.load(tmp_path / "c")
    assert [bits(array) for array in found] == [
        bits(np.asarray(jnp.arange(4, dtype=jnp.bfloat16))),
        bits(np.arange(2)),
    ]
    assert ckpt.inspect(tmp_path / "c").metadata == {"width": 4}


def test_eight_bit_floats_have_the_targets_dtype(tmp_path: Path) -> None:
    tree = {"a": jnp.ones(3, jnp.float8_e4m3b11fnuz), "b": jnp.ones(3, jnp.float8_e4m3fn)}
    with open(tmp_path / "m.eqx", "wb") as file:
        for leaf in tree.values():
            np.save(file, np.asarray(leaf))
    import_weights(tmp_path / "m.eqx", tmp_path / "c", like=tree)
    found = ckpt.load(tmp_path / "c")
    assert {n: bits(a) for n, a in found.items()} == {
        n: bits(np.asarray(a)) for n, a in tree.items()
    }
    with pytest.raises(ckpt.UnsupportedLeaf, match="no name of their dtype"):
        import_weights(tmp_path / "m.eqx", tmp_path / "d")


def test_another_target_and_damage(tmp_path: Path) -> None:
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", [jnp.ones(3), jnp.ones(2)])
    with pytest.raises(ckpt.StructureMismatch, match="2 leaves, wanted 1 leaves"):
        import_weights(tmp_path / "m.eqx", tmp_path / "c", like=[jnp.ones(3)])
    with pytest.raises(ckpt.StructureMismatch, match="shape"):
        import_weights(tmp_path / "m.eqx", tmp_path / "c", like=[jnp.ones(3), jnp.ones(4)])
    whole = (tmp_path / "m.eqx").read_bytes()
    for end in (len(whole) - 1, len(whole) // 2, 20, 3):
        (tmp_path / "m.eqx").write_bytes(whole[:end])
        with pytest.raises(ckpt.CheckpointCorrupt):
            import_weights(tmp_path / "m.eqx", tmp_path / "c", format="equinox")
    assert not (tmp_path / "c").exists()


def test_bytes_without_a_dtype_are_not_taken_for_the_targets(tmp_path: Path) -> None:
    for saved, like in [
        (jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float16)),
        (jnp.ones(2, jnp.bfloat16), np.ones(2, np.int16)),
        (jnp.ones(2, jnp.float8_e4m3fn), np.ones(2, np.int8)),
    ]:
        eqx.tree_serialise_leaves(tmp_path / "m.eqx", [saved])
        with pytest.raises((ckpt.StructureMismatch, ckpt.UnsupportedLeaf), match="dtype"):
            import_weights(tmp_path / "m.eqx", tmp_path / "c", like=[like])
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("saved", "like"), [(1.5, 1), (2, True), (1 + 2j, 1.0), (np.inf, 1)])
def test_numbers_that_are_not_of_the_targets_type(tmp_path: Path, saved: Any, like: Any) -> None:
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", [saved])
    with pytest.raises(ckpt.StructureMismatch, match=type(like).__name__):
        import_weights(tmp_path / "m.eqx", tmp_path / "c", like=[like])


def test_a_first_line_without_end(tmp_path: Path) -> None:
    (tmp_path / "m.eqx").write_bytes(b'{"a":' + b"[" * 100_000 + b"\n")
    with pytest.raises(ckpt.CheckpointCorrupt, match="nor with a line of JSON"):
        import_weights(tmp_path / "m.eqx", tmp_path / "c")
