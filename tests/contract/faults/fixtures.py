"""Fixtures that the fault tests share; a module imports the ones it uses."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.faults.harness import Pool, Unavailable, build_shim


@pytest.fixture(name="shim", scope="module")
def make_shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_shim(tmp_path_factory.mktemp("shim"))
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(name="pool", scope="module")
def make_pool(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two nurseries under the shim."""
    with Pool(tmp_path_factory.mktemp("nurseries"), shim=shim) as pool:
        yield pool


@pytest.fixture(name="plain_pool", scope="module")
def make_plain_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two nurseries without the shim: children that may die without taking pytest along."""
    if sys.platform != "linux":
        pytest.skip("the nurseries need Linux (pidfd, /proc)")
    with Pool(tmp_path_factory.mktemp("nurseries")) as pool:
        yield pool
