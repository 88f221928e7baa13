"""What the author of `ckpt_abacus` writes to have the adapter tested; run by test_third_party.py."""

from collections.abc import Callable
from typing import Any

import abacus
import pytest

from ckpt_core.testing import InPlaceSuite


class TestAbacus(InPlaceSuite):
    @pytest.fixture
    def make(self) -> Callable[[int], Any]:
        return abacus.Abacus

    @pytest.fixture
    def step(self) -> Callable[[Any], Any]:
        return abacus.Abacus.move


class TestFaulty(TestAbacus):
    """The same with something wrong with the adapter: proves that the suite finds it."""

    @pytest.fixture(
        params=["alias", "commit", "creep", "cut", "forget", "gather", "same", "shallow", "touch"],
        autouse=True,
    )
    def fault(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ABACUS_FAULT", request.param)  # new processes inherit it


class TestWithoutAdapter(InPlaceSuite):
    @pytest.fixture
    def make(self) -> Callable[[int], Any]:
        return lambda seed: object()

    @pytest.fixture
    def step(self) -> Callable[[Any], Any]:
        return id


class TestTheSame(TestAbacus):
    """Objects that do not differ, with which nothing would be tested."""

    @pytest.fixture
    def make(self) -> Callable[[int], Any]:
        return lambda seed: abacus.Abacus(0)

    @pytest.fixture
    def step(self) -> Callable[[Any], Any]:
        return lambda obj: None


class TestUnfinished(InPlaceSuite):
    """No fixtures."""
