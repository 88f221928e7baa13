"""How jax compiles while tests run."""

import os
from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(name="quick_compilation", scope="module", autouse=True)
def make_quick_compilation() -> Iterator[None]:
    """XLA spends less time on programs that run a few times on a few numbers."""
    before = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "0") == "1"  # as in children
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
