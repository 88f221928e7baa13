"""``background_priority="low"``: the threads of a background save give way, those that somebody waits for do not."""

import json

import pytest

from tests.support import forked
from tests.support.children import environment

CHILD = """
import json, os, sys
import numpy as np
import ckpt_core as ckpt
from tests.support import seams

path = sys.argv[1]
base = os.getpriority(os.PRIO_PROCESS, 0)
told = {}

def look(*_):
    told.setdefault(now, set()).add(os.getpriority(os.PRIO_PROCESS, 0) - base)

seams.at(None, "commit", before=look)
for priority in ("normal", "low"):
    options = ckpt.Options(background_priority=priority)
    for way in ("save", "save_async", "Checkpointer"):
        now = f"{priority} {way}"
        state = {"w": np.zeros(2**20, np.float32)}
        if way == "save":
            ckpt.save(f"{path}/{now}", state, options=options)
        elif way == "save_async":
            ckpt.save_async(f"{path}/{now}", state, options=options).result()
        else:
            with ckpt.Checkpointer(f"{path}/{now}", options=options) as run:
                run.save(0, state)
told = {name: list(found) for name, found in told.items()}
print(json.dumps([told, os.getpriority(os.PRIO_PROCESS, 0) - base, 19 - base]))
"""


@pytest.mark.linux("threads have priorities of their own")
def test_only_the_threads_of_a_background_save_give_way(tmp_path):
    done = forked.run(CHILD, str(tmp_path), environment=environment())
    assert done.returncode == 0, done.stderr
    told, caller, low = json.loads(done.stdout)
    assert caller == 0
    assert told.pop("low save_async") == told.pop("low Checkpointer") == [low]
    assert len(told) == 4 and all(found == [0] for found in told.values())
