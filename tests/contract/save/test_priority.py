"""``background_priority="low"``: the threads of a background save give way, those that somebody waits for do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.children import environment

# In a process of its own: the threads of TensorStore that other tests started would be lowered, too.
CHILD = """
import json, os, sys, threading
import numpy as np
import ckpt_core as ckpt
from tests.support import seams

path = sys.argv[1]
state = {"w": np.zeros(2**20, np.float32)}
base = os.getpriority(os.PRIO_PROCESS, 0)
found = []

def of_pool():
    for name in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{name}/comm") as file:
            if file.read().startswith("ts_pool"):
                yield os.getpriority(os.PRIO_PROCESS, int(name))

def look(*_):
    found.append([os.getpriority(os.PRIO_PROCESS, 0) - base, max(of_pool(), default=base) - base])
    gate.wait(60)

seams.at(None, "commit", before=look)
gate = threading.Event()
gate.set()
told = {}
ckpt.save(path + "/first", state)  # starts TensorStore's threads
for priority in ("normal", "low"):
    options = ckpt.Options(background_priority=priority)
    for way in ("function", "save_async", "Checkpointer"):
        found.clear()
        place = f"{path}/{priority}-{way}"
        if way == "function":
            ckpt.save(place, state, options=options)
        else:
            gate.clear()
            if way == "save_async":
                wait = ckpt.save_async(place, state, options=options).result
            else:
                run = ckpt.Checkpointer(place, options=options)
                run.save(0, state)
                wait = run.close
            while not found:
                gate.wait(0.01)
            gate.set()
            wait()
        told[f"{priority} {way}"] = list(found)
print(json.dumps([told, os.getpriority(os.PRIO_PROCESS, 0) - base, 19 - base]))
"""


@pytest.mark.linux("threads have priorities of their own")
def test_only_the_threads_of_a_background_save_give_way(tmp_path: Path) -> None:
    done = forked.run(CHILD, str(tmp_path), environment=environment())
    assert done.returncode == 0, done.stderr
    told, caller, low = json.loads(done.stdout)
    assert caller == 0
    assert told.pop("low save_async")[0] == told.pop("low Checkpointer")[0] == [low, low]
    assert [own for own, _ in told.pop("low function")] == [0]
    assert len(told) == 3 and all(
        own == 0 for name, every in told.items() if name.startswith("normal") for own, _ in every
    )
