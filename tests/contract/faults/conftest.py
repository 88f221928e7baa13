"""Fixtures of all tests here: the shim, and children with it and without."""

import sys
from pathlib import Path

import pytest

from tests.contract.faults.harness import Children, Unavailable, build_shim


@pytest.fixture(name="shim", scope="module")
def make_shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_shim(tmp_path_factory.getbasetemp())  # once: all modules fork from one process
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(name="pool", scope="module")
def make_pool(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Children:
    """Children under the shim."""
    return Children(tmp_path_factory.mktemp("children"), shim=shim)


@pytest.fixture(name="plain_pool", scope="module")
def make_plain_pool(tmp_path_factory: pytest.TempPathFactory) -> Children:
    """Children without the shim, which may die without taking pytest along."""
    if sys.platform != "linux":
        pytest.skip("the children need Linux (pidfd, /proc)")
    return Children(tmp_path_factory.mktemp("children"))
