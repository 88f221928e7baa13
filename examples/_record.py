"""Records a run for the comparison: every loss, and digests of the final state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx


def log_to(path: Path) -> Callable[[int, jax.Array], None]:
    """A function that appends a line for a step: as a decimal number, its loss keeps every bit."""
    file = path.open("a", buffering=1)  # a write for each line: a killed run leaves complete ones

    def report(step: int, loss: jax.Array) -> None:
        file.write(json.dumps({"step": step, "loss": float(loss)}) + "\n")

    return report


def write_fingerprint(path: Path, model: Any, optimizer: Any, data: Any) -> None:
    """Writes the SHA-256 of every leaf of the final state, and of the next batches of the data."""
    groups = {
        "parameters": nnx.state(model, nnx.Param),
        "optimizer state": nnx.state(optimizer),
        "random state": nnx.state(model, nnx.RngState),
        "iterator position": json.dumps(data.get_state()),
        "next 4 batches": [next(data) for _ in range(4)],
    }
    digests = {
        name: {
            jax.tree_util.keystr(path): _digest(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(group)
        }
        for name, group in groups.items()
    }
    path.write_text(json.dumps(digests, indent=1))


def _digest(leaf: Any) -> str:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()
