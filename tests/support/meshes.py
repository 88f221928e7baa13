"""Meshes that are the same with every version of JAX."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh


def explicit_mesh(shape: Sequence[int], names: Sequence[str]) -> Mesh:
    """What ``jax.make_mesh(shape, names)`` makes since JAX 0.9, of the first devices.

    Before 0.9 the axes would be Auto, with a warning that this is going to change.
    """
    return jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(shape))
