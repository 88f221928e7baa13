"""Local directories in memory over a bucket: a lost host reads no object of it, and a loss of all is made good from it."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes.test_lost_hosts import COMMON
from tests.support.gcs_server import Server
from tests.support.launch import launch, reports

OVER = (
    COMMON
    + """
url, memory = {url!r}, {memory!r}
own = Path(f"{memory}/{index}")
by = P("data")

def start(by, local=own):
    often = ckpt.when.every_steps(2)
    options = ckpt.Options(timeout_secs=60, persist_policy=often, partners="host")
    return ckpt.Checkpointer(url, local_directory=local, options=options)

def restored(by):
    with start(by) as checkpointer:
        found = resume(checkpointer, by)
        return found and [found.step, found.path.startswith(str(own))]
"""
)


@pytest.fixture(name="memory")
def make_memory() -> Iterator[str]:
    """A directory in memory, if this machine has such."""
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="ckpt-test-", dir=where) as folder:
        yield folder


def run(url: str, memory: str, tmp_path: Path, code: str) -> list[object]:
    text = OVER.replace("{url!r}", repr(url)).replace("{memory!r}", repr(memory)) + code
    told = reports(launch(text, tmp_path / "run", processes=3, devices=1, limit_secs=150))
    return [one.get("restored") for one in told]


LOST = """
on(count - 1, lose)
told["restored"] = restored(by)
report(**told)
"""
ALL_LOST = "lose()\nmeet('all lost')\ntold['restored'] = restored(by)\nreport(**told)"


def of_steps(server: Server) -> list[str]:
    """The names of objects of steps that were read."""
    names = [request.name for request in server.requests if request.kind == "get"]
    return [name for name in names if name.removeprefix("run/")[:1].isdigit()]


def test_a_google_bucket(server, memory, tmp_path):
    url = f"{server.root}/run"
    run(url, memory, tmp_path, "train(3, by)\nreport(**told)")
    uploaded = {name.split("/")[1] for name in server.names() if name[4:5].isdigit()}
    assert uploaded == {"0", "2"}
    server.requests.clear()
    assert run(url, memory, tmp_path, LOST) == [[3, True]] * 3
    assert server.requests and not of_steps(server)
    assert run(url, memory, tmp_path, ALL_LOST) == [[2, False]] * 3
    assert of_steps(server)


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_an_s3_bucket(store, memory, tmp_path):
    run(store, memory, tmp_path, "train(3, by)\nreport(**told)")
    assert run(store, memory, tmp_path, LOST) == [[3, True]] * 3
    assert run(store, memory, tmp_path, ALL_LOST) == [[2, False]] * 3
