"""What all tests beside Orbax share: silence, and arrays on a mesh of eight devices."""

from collections.abc import Iterator
from typing import Any

import absl.logging
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding

from tests.support.same_bits import is_key


@pytest.fixture(name="_quiet_orbax", autouse=True, scope="module")
def make_quiet_orbax() -> Iterator[None]:
    """Keeps Orbax's warnings, of missing shardings and of routes it likes less, out of the log."""
    before = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.FATAL)
    yield
    absl.logging.set_verbosity(before)


def eight_mesh() -> Mesh:
    """A mesh of 4 x 2 devices with the axes `x` and `y`."""
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


def move(value: Any, sharding: Sharding) -> jax.Array:
    """The array on that sharding; through the host, where nothing has to be compiled."""
    return jax.device_put(value if is_key(value) else np.asarray(value), sharding)


def put(value: Any, *spec: Any) -> jax.Array:
    """The array on the mesh of eight devices."""
    return move(value, NamedSharding(eight_mesh(), P(*spec)))
