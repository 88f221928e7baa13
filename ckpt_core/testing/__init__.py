"""Tools for users' tests: exact resume, a test suite for adapters, hypothesis strategies.

``assert_exact_resume(train)``
    runs a training function once without and once with interruptions, and compares bit for bit.
    Also a pytest fixture of that name, wherever ckpt is installed.
``assert_same(actual, expected)``
    compares two values bit for bit, and names the first leaf that differs.
``InPlaceSuite``, ``PytreeSuite``
    pytest classes that an adapter's tests inherit.
``strategies``
    hypothesis strategies for leaves and pytrees.

Each name is imported at its first use, so that loading the pytest plugin imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_core.testing import strategies as strategies
    from ckpt_core.testing._prints import assert_same as assert_same
    from ckpt_core.testing._resume import (
        ExactResume as ExactResume,
        Interrupted as Interrupted,
        Report as Report,
        assert_exact_resume as assert_exact_resume,
    )
    from ckpt_core.testing.suite import InPlaceSuite as InPlaceSuite, PytreeSuite as PytreeSuite

_HOMES = {
    "_prints": ("assert_same",),
    "_resume": ("ExactResume", "Interrupted", "Report", "assert_exact_resume"),
    "strategies": ("strategies",),
    "suite": ("InPlaceSuite", "PytreeSuite"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ckpt_core.testing' has no attribute {name!r}")
    home = importlib.import_module(f"ckpt_core.testing.{_HOME_OF[name]}")
    globals()[name] = value = home if name == _HOME_OF[name] else getattr(home, name)
    return value


def __dir__() -> list[str]:
    return __all__
