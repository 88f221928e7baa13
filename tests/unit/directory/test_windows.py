"""On Windows, checkpoints that a cluster wrote are read, in a process that has no POSIX; saving there is refused."""

import ntpath
import os
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import paths
from ckpt_core._storage import Location, location
from tests.support import children
from tests.support.same_program import comes_back

CLUSTER = """
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
def make(n):
    data = np.arange(16, dtype=np.float32) + n
    return {"w": jax.make_array_from_callback((16,), sharding, lambda at: data[at]), "n": n}
"""

READER = """
import contextlib, io, json, os, sys
# what is here before does not ask ckpt's questions, and must find the Linux that is underneath
import concurrent.futures, tempfile, multiprocessing.connection
import jax, jax.numpy as jnp, numpy as np, tensorstore, crc32c, zstandard, ml_dtypes, typer, rich, rich.console
import typer.testing, rich.table, rich.progress, rich.tree
jnp.ones(3).block_until_ready()
import masked_platform
masked_platform.install("windows")

import ckpt_core as ckpt
from ckpt_core.cli import main

root = sys.argv[1]
step = f"{root}/run/2"
before = sorted(os.listdir(root)), sorted(os.listdir(f"{root}/run"))
told = {"absent": [name in sys.modules and sys.modules[name] is not None for name in ("fcntl", "resource", "pwd", "grp")]}
loaded = ckpt.load(step)
told["loaded"] = [loaded["state"]["n"], np.asarray(loaded["state"]["w"]).tolist()]
like = {"w": np.zeros(16, np.float32), "n": 0}
told["like"] = np.asarray(ckpt.load(step, {"state": like})["state"]["w"]).tolist()
told["arrays"] = ckpt.load(step, as_numpy=True)["state"]["w"].tolist()
told["inspected"] = str(ckpt.inspect(step))
told["ok"] = ckpt.verify(step).ok
with ckpt.Checkpointer(f"{root}/run", read_only=True) as run:
    told["steps"] = run.all_steps()
    told["latest"] = run.restore_latest(state=like)["state"]["n"]

def command(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            sys.argv = ["ckpt", *arguments]
            main()
        except SystemExit as left:
            code = left.code or 0
    return [code, out.getvalue()]

told["commands"] = {
    name: command(name, *more)
    for name, *more in [
        ("ls", f"{root}/run"), ("show", step), ("verify", step), ("diff", f"{root}/run/1", step), ("stats", step),
        ("doctor", root),
    ]
}
told["refused"] = {}
for name, call in {
    "save": lambda: ckpt.save(f"{root}/new", like),
    "save_async": lambda: ckpt.save_async(f"{root}/new", like).result(),
    "Checkpointer": lambda: ckpt.Checkpointer(f"{root}/run").save(3, state=like),
    "overwrite": lambda: ckpt.save(step, like, overwrite=True),
}.items():
    try:
        call()
        told["refused"][name] = None
    except Exception as error:
        told["refused"][name] = [type(error).__name__, str(error)]
told["delete"] = command("rm", "--yes", f"{root}/run/1")
told["after"] = [before, (sorted(os.listdir(root)), sorted(os.listdir(f"{root}/run")))]
ckpt.save("memory://new/1", like)
told["memory"] = ckpt.load("memory://new/1")["n"]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(run_python: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What such a process says of a run that two processes with four devices wrote."""
    root = tmp_path_factory.mktemp("cluster")
    comes_back(CLUSTER, root / "saved")
    folder = children.masked("windows")["PYTHONPATH"]
    return run_python(READER, str(root / "saved"), PYTHONPATH=folder)


def test_the_process_has_no_posix(told):
    assert told["absent"] == [False] * 4


def test_what_a_cluster_wrote_is_loaded(told):
    everything = [n + 7.0 for n in range(16)]
    assert told["loaded"] == [7, everything]
    assert told["like"] == told["arrays"] == everything


def test_it_is_inspected_and_verified(told):
    assert "state" in told["inspected"] and told["ok"]
    assert told["steps"] == [1, 2] and told["latest"] == 7


@pytest.mark.parametrize("command", ["ls", "show", "verify", "diff", "stats", "doctor"])
def test_the_command_looks_at_it(told, command):
    code, text = told["commands"][command]
    assert "Traceback" not in text
    assert code == (1 if command == "diff" else 0), text


@pytest.mark.parametrize("call", ["save", "save_async", "Checkpointer", "overwrite"])
def test_saving_into_a_directory_is_refused_with_the_reason(told, call):
    name, text = told["refused"][call]
    assert name == "CheckpointError" and "on Windows" in text and "object store" in text


def test_nothing_was_changed(told):
    code, text = told["delete"]
    assert code == 2 and "on Windows" in text
    before, after = told["after"]
    assert before == after and {"one", "run", "tiers"} <= set(after[0])


def test_saving_to_an_object_store_is_not(told):
    assert told["memory"] == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (r"C:\runs\1", "C:/runs/1"),
        ("c:/runs/1/", "c:/runs/1"),
        (r"\\server\share\run", "//server/share/run"),
    ],
)
def test_paths_of_windows_are_those_that_tensorstore_takes(monkeypatch, given, expected):
    with monkeypatch.context() as windows:
        windows.setattr(paths, "WINDOWS", True)
        windows.setattr(os, "path", ntpath)
        found = paths.resolve(given)
    assert found == (expected, True)
    drives = ("/", "C:/", "c:/")
    monkeypatch.setattr(location, "ROOTS", drives)
    assert Location(*found).spec() == {"driver": "file", "path": expected + "/"}


def test_a_backslash_is_refused_elsewhere(tmp_path):
    with pytest.raises(ValueError, match="backslash"):
        ckpt.save(str(tmp_path / "a") + r"\b", {"w": np.zeros(1)})
