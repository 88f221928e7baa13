"""Meshes that are the same with every version of JAX."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh


def explicit_mesh(shape: Sequence[int], names: Sequence[str]) -> Mesh:
    """What ``jax.make_mesh`` makes since JAX 0.9, of the first devices; before, axes would be Auto, with a warning."""
    return jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(shape))
