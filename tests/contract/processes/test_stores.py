"""Processes and object stores: they save and load together; local directories in memory over a bucket."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt_core as ckpt
from tests.contract.processes.test_lost_hosts import COMMON
from tests.contract.processes.test_two_processes import PRELUDE
from tests.support.gcs_server import Server
from tests.support.launch import launch, reports
from tests.support.stores import keys_at

SERVERS = pytest.mark.parametrize("store", ["gs", "s3"], indirect=True)


@SERVERS
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_two_processes_save_and_load_together(store, compression, tmp_path):
    pytest.importorskip("grain")
    code = f"""
import grain
url = {store!r}
options = ckpt.Options(timeout_secs=60, compression={compression!r})

def pipeline():
    return iter(grain.MapDataset.range(40)[index::2].to_iter_dataset())

batches = pipeline()
with ckpt.Checkpointer(url, max_to_keep=2, options=options) as checkpointer:
    for step in range(4):
        next(batches)
        checkpointer.save(step, state=state(step), data=batches, metrics={{"loss": step}})
    checkpointer.wait_until_finished()
    ckpt.save(f"{{url}}-over", state(1), options=options)
    ckpt.save(f"{{url}}-over", state(2), options=options, overwrite=True)
    again = pipeline()
    restored = checkpointer.restore_latest(state=state(9), data=again)
meet("closed")
report(
    step=restored.step,
    restored=is_at(restored["state"], 3),
    batch=int(next(again)) == int(next(batches)),
    steps=checkpointer.all_steps(),
    over=is_at(ckpt.load(f"{{url}}-over", state(9)), 2),
    verified=ckpt.verify(f"{{url}}/3").ok and ckpt.verify(f"{{url}}-over").ok,
)
"""
    told = reports(launch(PRELUDE + code, tmp_path / "run"))
    expected = {"step": 3, "restored": True, "batch": True, "steps": [2, 3], "over": True}
    assert told == [expected | {"verified": True}] * 2
    # and in one process, which has eight devices; what passed between the processes is gone
    for url in (f"{store}/2", f"{store}/3", f"{store}-over"):
        assert ckpt.verify(url).ok
        names = keys_at(url).list()
        assert not any(".passing!" in name or name.endswith(".owner") for name in names)
        assert {"commit_success.txt", "state/manifest.ocdbt"} <= {*names}
        # Orbax takes every folder for an item
        assert not any(name.startswith(".") and "/" in name for name in names)


def test_a_store_that_the_processes_do_not_share_is_refused(tmp_path):
    code = """
try:
    ckpt.save("memory://mine/a", state(), options=options)
except ckpt.CheckpointError as error:
    report(said="all processes share" in str(error))
"""
    assert reports(launch(PRELUDE + code, tmp_path / "run")) == [{"said": True}] * 2


OVER = """
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


@pytest.fixture(name="memory")
def make_memory() -> Iterator[str]:
    """A directory in memory, if this machine has such."""
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="ckpt-test-", dir=where) as folder:
        yield folder


def run(url: str, memory: str, tmp_path: Path, code: str) -> list[object]:
    text = COMMON + OVER.replace("{url!r}", repr(url)).replace("{memory!r}", repr(memory)) + code
    told = reports(launch(text, tmp_path / "run", processes=3, devices=1, limit_secs=150))
    return [one.get("restored") for one in told]


LOST = """
on(count - 1, lose)
told["restored"] = restored(by)
"""
ALL_LOST = "lose()\nmeet('all lost')\ntold['restored'] = restored(by)"


def of_steps(server: Server) -> list[str]:
    """The names of objects of steps that were read."""
    names = [request.name for request in server.requests if request.kind == "get"]
    return [name for name in names if name.removeprefix("run/")[:1].isdigit()]


def test_a_google_bucket(server, memory, tmp_path):
    url = f"{server.root}/run"
    run(url, memory, tmp_path, "train(3, by)")
    uploaded = {name.split("/")[1] for name in server.names() if name[4:5].isdigit()}
    assert uploaded == {"0", "2"}
    server.requests.clear()
    assert run(url, memory, tmp_path, LOST) == [[3, True]] * 3
    assert server.requests and not of_steps(server)
    assert run(url, memory, tmp_path, ALL_LOST) == [[2, False]] * 3
    assert of_steps(server)


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_an_s3_bucket(store, memory, tmp_path):
    run(store, memory, tmp_path, "train(3, by)")
    assert run(store, memory, tmp_path, LOST) == [[3, True]] * 3
    assert run(store, memory, tmp_path, ALL_LOST) == [[2, False]] * 3
