"""Orbax is quiet in all tests here; of each load that is given no sharding it warns, and those are what is tested."""

import pytest

from tests.support.orbax import make_quiet_orbax as make_quiet_orbax  # a fixture


def pytest_itemcollected(item: pytest.Item) -> None:
    mark = "ignore:Sharding info not provided:UserWarning"
    item.add_marker(pytest.mark.filterwarnings(mark))
