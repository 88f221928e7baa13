"""What only Linux has is taken away from a process: it saves, replaces, verifies, deletes and resumes all the same.

`CKPT_TEST_PLATFORM=portable make test` runs the quick tests that way.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support import children

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
