"""Records a run for the comparison: the bits of every loss, and digests of the final state."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx


class LossLog:
    """Appends one line per step: the loss as a decimal number, and its float32 bit pattern."""

    def __init__(self, path: Path):
        # O_APPEND and one write per line, so that a killed run leaves complete lines.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, step: int, loss: jax.Array) -> None:
        value = np.float32(loss)
        entry = {"step": step, "loss": float(value), "bits": f"{value.view(np.uint32):08x}"}
        os.write(self._file, (json.dumps(entry) + "\n").encode())


def write_fingerprint(path: Path, model: Any, optimizer: Any, data: Any) -> None:
    """Writes the SHA-256 of every leaf of the final state, and of the next batch of the data."""
    groups = {
        "parameters": _digests(nnx.state(model, nnx.Param)),
        "optimizer state": _digests(nnx.state(optimizer)),
        "random state": _digests(nnx.state(model, nnx.RngState)),
        "iterator position": {"state": _digest(json.dumps(data.get_state()).encode())},
        "next 4 batches": _digests([next(data) for _ in range(4)]),
    }
    path.write_text(json.dumps(groups, indent=1))


def _digests(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): _digest(_bytes_of(leaf)) for path, leaf in leaves}


def _bytes_of(leaf: Any) -> bytes:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return f"{array.dtype} {array.shape} ".encode() + array.tobytes()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
