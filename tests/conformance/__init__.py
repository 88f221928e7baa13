"""`ckpt_core.testing`: the suite for adapters, exact resume, strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_core.testing import InPlaceSuite


def suite_of(
    name: str, make: Callable[[int], Any], step: Callable[[Any], Any], suite: type = InPlaceSuite
) -> type:
    """``class name(suite)`` in the module of ``step``, with the fixtures ``make`` and ``step``."""
    fixtures = {"make": lambda _: make, "step": lambda _: step}
    named = {key: pytest.fixture(function, name=key) for key, function in fixtures.items()}
    return type(name, (suite,), {"__module__": step.__module__, **named})
