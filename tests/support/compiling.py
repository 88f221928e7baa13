"""How jax compiles while tests run."""

import os
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(name="quick_compilation", scope="module", autouse=True)
def make_quick_compilation() -> Iterator[None]:
    """XLA spends less time on programs that run a few times on a few numbers."""
    before = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "0") == "1"  # as in children
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What modules and new processes compile, the next ones find: of some frameworks seven eighths of the time."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "jax-cache"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
