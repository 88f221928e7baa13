"""A restore that fails in one process, or in several for different reasons: all hear of it and go on together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes.test_one_history import COMMON
from tests.support.launch import launch, reports

OPEN = (
    COMMON
    + """
def begin(kind):
    persists = ckpt.Options(timeout_secs=30, local_max_to_keep=4, persist_policy=never if kind == "local" else always)
    local = None if kind == "plain" else Path(f"{directory}/{kind}/local/{index}")
    return ckpt.Checkpointer(f"{directory}/{kind}/steps", local_directory=local, options=persists)

def told_of(call):
    began = time.monotonic()
    try:
        result = [None, call().step]
    except BaseException as error:
        result = [type(error).__name__, str(error)]
    return [*result, time.monotonic() - began]
"""
)

SETTING = (
    OPEN
    + """
class Box:
    def __init__(self, value, bad=""):
        self.value, self.bad = value, bad
    def get_state(self):
        return {"value": self.value}
    def set_state(self, state):
        if self.bad and state["value"] > 0:
            if self.bad == "a file":
                np.load(f"{directory}/its data, which is gone")
            raise {"a value": ValueError, "Ctrl-C": KeyboardInterrupt}[self.bad](self.bad)
        self.value = state["value"]

with begin(kind) as c:
    for step in (1, 2):
        c.save(step, state=state(step), box=Box(step * 10))
for bad in ("a value", "a file", "Ctrl-C"):
    for who in range(count):
        with begin(kind) as c:
            box, sound = Box(-1, bad if index == who else ""), Box(-1)
            found = told_of(lambda: c.restore_latest(state=like(), box=box))
            again = [c.restore_latest(state=like(), box=sound).step, sound.value]
            told[f"{bad} {who}"] = [index == who, found, box.value, again, c.restore(1, box=sound).step]
with begin(kind) as c:
    c.restore(1, state=like(), box=Box(-1))["state"]
    c.save(3, box=Box(30), state=state(3))
with begin(kind) as c:
    told["then"] = c.all_steps()
report(**told)
"""
)


@pytest.mark.parametrize("kind", ["plain", "local", "tiers"])
def test_an_object_refuses_in_one_process_to_be_set(tmp_path: Path, kind: str) -> None:
    """No process goes on from a step that another one did not get, nor is the step taken for damaged."""
    all_told = reports(launch(f"kind = {kind!r}\n{SETTING}", tmp_path / "run", devices=1))
    classes = {
        "a value": "ValueError",
        "a file": "FileNotFoundError",
        "Ctrl-C": "KeyboardInterrupt",
    }
    for told in all_told:
        assert told.pop("then") == [1, 3]
        for name, (its_own, (error, text, secs), value, again, older) in told.items():
            bad = classes[name.rpartition(" ")[0]]
            assert error == (bad if its_own else "CheckpointError"), (name, error, text)
            assert its_own or bad in text, (name, text)
            assert secs < 10, name
            assert (value, again, older) == (-1, [2, 20], 1), (name, value, again, older)


DIFFERENT = (
    OPEN
    + """
def failing(kind):
    def fail(*_):
        if kind == "file":
            np.load(f"{directory}/nowhere")
        raise {"damage": ckpt.CheckpointCorrupt, "gone": ckpt.CheckpointNotFound,
               "Ctrl-C": KeyboardInterrupt}[kind](kind)
    return fail

with begin("plain") as c:
    for step in (1, 2):
        c.save(step, state=state(step))
for kinds in (("damage", "file"), ("file", "damage"), ("gone", "damage"), ("damage", "gone"),
              ("damage", "Ctrl-C"), ("damage", "damage")):
    with begin("plain") as c:
        open_, c._run._steps.open = c._run._steps.open, lambda step, *more: (
            failing(kinds[index])() if step == 2 else open_(step, *more))
        found = told_of(lambda: c.restore_latest(state=like()))
        c._run._steps.open = open_
        told[" ".join(kinds)] = [*found, c.restore_latest(state=like()).step]
report(**told)
"""
)


def test_processes_that_fail_for_different_reasons_go_one_way(tmp_path: Path) -> None:
    """Only a step that is damaged, and nothing else, is skipped: in all processes, or in none."""
    names = {
        "damage": "CheckpointCorrupt",
        "gone": "CheckpointNotFound",
        "file": "FileNotFoundError",
        "Ctrl-C": "KeyboardInterrupt",
    }
    all_told: list[dict[str, Any]] = reports(launch(DIFFERENT, tmp_path / "run", devices=1))
    for index, told in enumerate(all_told):
        assert told.pop("damage damage")[:2] == [None, 1]
        for kinds, (error, text, secs, again) in told.items():
            kind = kinds.split(" ")[index]
            assert error == names[kind], (kinds, error, text)
            assert secs < 10, kinds
            assert again == 2, kinds
