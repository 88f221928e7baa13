"""What only Linux has is taken away from a process: it saves, replaces, verifies, deletes and resumes all the same; one that
has no POSIX, as on Windows, reads what a cluster wrote, and refuses to save.

`CKPT_TEST_PLATFORM=portable make test` runs the quick tests that way.
"""

import ntpath
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import paths
from ckpt_core._storage import Location, location
from tests.support import children
from tests.support.same_program import comes_back

LIFE = """
import json, os, subprocess, sys
import masked_platform
import numpy as np
import ckpt_core as ckpt
from ckpt_core import _platform
from ckpt_core._directory import files, hidden_names, owner, paths

root = sys.argv[1]
masked_platform.recording = True
calls = masked_platform.asked
told = {"system": [_platform.LINUX, _platform.MACOS, _platform.WINDOWS]}
sys.addaudithook(
    lambda event, given: calls.append(f"rename {given[1]}") if event == "os.rename" else None
)

def state(value):
    return {"w": np.full(3, value)}

told["taken away"] = [
    owner._start_time(os.getpid()) is None,
    paths.file_system_of("/") == "",
    not paths.is_local_disk("/"),
    not hasattr(os, "O_TMPFILE") and not hasattr(os, "posix_fadvise"),
    not files.exchange(root, root),
]
calls.clear()
ckpt.save(f"{root}/one", state(1))
told["saved"], calls[:] = list(calls), []
ckpt.save(f"{root}/one", state(2), overwrite=True)
told["replaced"], calls[:] = list(calls), []
told["value"] = ckpt.load(f"{root}/one")["w"].tolist()
told["ok"] = ckpt.verify(f"{root}/one").ok
told["beside"] = os.listdir(root)

with ckpt.Checkpointer(f"{root}/run", max_to_keep=2) as run:
    for step in range(4):
        run.save(step, state=state(step))
ended = subprocess.Popen(["true"])
ended.wait()
host, pid, start = owner.this_owner().split("-")
left = hidden_names.make(hidden_names.TEMPORARY, f"{root}/run", "4")
for of, number in (("dead", ended.pid), ("alive", os.getppid())):
    os.mkdir(left.replace(owner.this_owner(), f"{host}-{number}-"))
with ckpt.Checkpointer(f"{root}/run", max_to_keep=2) as run:
    restored = run.restore_latest(state=state(0))
    told["resumed"] = [restored.step, restored["state"]["w"].tolist()]
    run.save(4, state=state(4))
    run.wait_until_finished()
    told["steps"] = run.all_steps()
told["left"] = [hidden_names.parse(name).owner for name in os.listdir(f"{root}/run") if ".ckpt-tmp" in name]
told["parent"] = f"{host}-{os.getppid()}-"
name = next(os.path.join(at, one) for at, _, files in os.walk(f"{root}/one") for one in files if one == "ckpt.json")
with open(name, "r+b") as file:
    file.seek(10); file.write(b"?????")
told["damaged"] = ckpt.verify(f"{root}/one").ok
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(run_python: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What such a process says."""
    root = tmp_path_factory.mktemp("life")
    found = run_python(LIFE, str(root), **children.masked("portable"))
    return found | {"root": str(root)}


def test_what_only_linux_has_is_taken_away(told):
    assert told["system"] == [False, True, False]
    assert told["taken away"] == [True] * 5


def test_saves_replaces_and_verifies(told):
    assert (told["value"], told["ok"], told["beside"]) == ([2] * 3, True, ["one"])
    assert told["damaged"] is False


def test_a_save_empties_the_drives_cache_before_and_after_it_gets_its_name(told):
    root, calls = told["root"], told["saved"]
    named = calls.index(f"rename {root}/one")
    synced = [call for call in calls[:named] if call.startswith("F_FULLFSYNC")]
    assert synced[-2].endswith("/ckpt.json") and Path(synced[-1]).name.startswith(".ckpt-tmp.")
    assert calls[named + 1 :] == [f"F_FULLFSYNC {root}"]


def test_a_replacement_is_two_renames(told):
    """Between them, readers find the old checkpoint under its hidden name."""
    renamed = [Path(call).name for call in told["replaced"] if call.startswith("rename")]
    assert renamed[0].startswith(".ckpt-old.one.") and renamed[1] == "one"


def test_a_run_resumes_keeps_its_newest_steps_and_clears_up(told):
    assert told["resumed"] == [3, [3] * 3]
    assert told["steps"] == [3, 4]
    assert told["left"] == [told["parent"]]  # of a process that lives


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
def told_there(run_python: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What such a process says of a run that two processes with four devices wrote."""
    root = tmp_path_factory.mktemp("cluster")
    comes_back(CLUSTER, root / "saved")
    folder = children.masked("windows")["PYTHONPATH"]
    return run_python(READER, str(root / "saved"), PYTHONPATH=folder)


def test_the_process_has_no_posix(told_there):
    assert told_there["absent"] == [False] * 4


def test_what_a_cluster_wrote_is_loaded(told_there):
    everything = [n + 7.0 for n in range(16)]
    assert told_there["loaded"] == [7, everything]
    assert told_there["like"] == told_there["arrays"] == everything


def test_it_is_inspected_and_verified(told_there):
    assert "state" in told_there["inspected"] and told_there["ok"]
    assert told_there["steps"] == [1, 2] and told_there["latest"] == 7


@pytest.mark.parametrize("command", ["ls", "show", "verify", "diff", "stats", "doctor"])
def test_the_command_looks_at_it(told_there, command):
    code, text = told_there["commands"][command]
    assert "Traceback" not in text
    assert code == (1 if command == "diff" else 0), text


@pytest.mark.parametrize("call", ["save", "save_async", "Checkpointer", "overwrite"])
def test_saving_into_a_directory_is_refused_with_the_reason(told_there, call):
    name, text = told_there["refused"][call]
    assert name == "CheckpointError" and "on Windows" in text and "object store" in text


def test_nothing_was_changed(told_there):
    code, text = told_there["delete"]
    assert code == 2 and "on Windows" in text
    before, after = told_there["after"]
    assert before == after and {"one", "run", "tiers"} <= set(after[0])


def test_saving_to_an_object_store_is_not(told_there):
    assert told_there["memory"] == 0


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
