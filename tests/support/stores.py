"""Fixtures of object stores: in memory, a server of Google's JSON API, and SeaweedFS, which speaks S3."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import ObjectStoreBackend
from ckpt_core._storage import KeyValues, Location, backend_of
from tests.support import gcs_server, s3_server
from tests.support.gcs_server import Server
from tests.support.s3_server import BUCKET as BUCKET

_numbers = itertools.count()


@pytest.fixture(name="server")
def make_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with gcs_server.running() as state:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", state.url)
        # nobody asks the metadata server of a machine that is not in Google's cloud
        monkeypatch.setenv("GCE_METADATA_ROOT", "127.0.0.1:1")
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
        yield state


@pytest.fixture(name="s3_url", scope="session")
def make_s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a SeaweedFS with one bucket."""
    if s3_server.program() is None:
        pytest.skip(s3_server.MISSING)
    with s3_server.running(tmp_path_factory.mktemp("weed")) as url:
        yield url


@pytest.fixture(name="store", params=["memory", "gs", "s3"])
def make_store(request: pytest.FixtureRequest) -> str:
    """URL of a prefix of its own."""
    return url_of_kind(request, request.param)


WITH_STORES = ["local", "memory", "gs", "s3"]


def url_of_kind(request: pytest.FixtureRequest, kind: str) -> str:
    """URL of a prefix of its own in a store of a kind; the environment says how to reach that until the test ends."""
    if kind == "gs":
        return f"{request.getfixturevalue('server').root}/run"
    if kind == "s3":
        patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        url = request.getfixturevalue("s3_url")
        for name, value in {"AWS_ENDPOINT_URL": url, **s3_server.USER}.items():
            patch.setenv(name, value)
        return f"s3://{BUCKET}/{next(_numbers)}/run"
    return f"memory://test-stores-{os.getpid()}-{next(_numbers)}/run"


# ---- checkpoints of a tree of which it can be told whether it is whole ------------------------------


def tree(n: int) -> dict[str, Any]:
    return {"w": np.full((64, 64), n), "small": np.full(2, n), "n": n}


def keys_at(url: str) -> KeyValues:
    return KeyValues(Location(url, False))


def backend() -> ObjectStoreBackend:
    return ObjectStoreBackend(keys_at)


def delete_at(path: str) -> None:
    """Removes a checkpoint, on a disk or in a store, and tells no run of it."""
    backend_of("://" not in path).delete(path)


def value_at(url: str) -> int | None:
    """The number of the tree at a URL, which must be whole; None if there is none."""
    try:
        found = ckpt.load(url)
    except ckpt.CheckpointNotFound:
        return None
    assert (found["w"] == found["n"]).all() and (found["small"] == found["n"]).all()
    return found["n"]


def saved(url: str, n: int, **arguments: Any) -> bool:
    try:
        ckpt.save(url, tree(n), **arguments)
    except ckpt.CheckpointExists:
        return False
    return True
