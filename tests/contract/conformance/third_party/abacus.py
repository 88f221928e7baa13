"""A framework that nobody has heard of: numbers in rows, moved in place."""

import jax
import jax.numpy as jnp
import numpy as np


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that jax can take over without copying."""
    buffer = np.empty(array.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Abacus:
    """Rows of jax arrays, a key, and a numpy array that is changed in place."""

    def __init__(self, seed: int) -> None:
        self.rows = [jnp.arange(8.0) + seed, jnp.ones((8, 2)) * seed]
        self.key = jax.random.key(seed)
        self.beads = aligned(np.full(64, seed, np.int32))
        self.moves = seed

    def move(self) -> float:
        """One step; changes everything there is."""
        self.key, key = jax.random.split(self.key)
        self.rows = [row * 0.5 + jax.random.normal(key, row.shape) for row in self.rows]
        self.beads += 1
        self.moves += 1
        return float(sum(row.sum() for row in self.rows))
