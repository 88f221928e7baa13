"""`ckpt_core.testing`: the suite for adapters, exact resume, strategies."""

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_core.testing import InPlaceSuite


class CasesSuite(InPlaceSuite):
    """The suite for each ``case``, which is what makes an object and what moves it on."""

    @pytest.fixture
    def make(self, case: tuple[Any, Any]) -> Callable[[int], Any]:
        return case[0]

    @pytest.fixture
    def step(self, case: tuple[Any, Any]) -> Callable[[Any], Any]:
        return case[1]


def given(value: Any) -> Any:
    """A fixture of a suite."""
    return pytest.fixture(lambda self: value)


def each_of(cases: dict[str, tuple[Any, Any]]) -> Any:
    """The fixture ``case`` of a ``CasesSuite``."""
    return pytest.fixture(params=cases)(lambda self, request: cases[request.param])
