"""Processes that make different calls at one moment, or of which one wrote what process 0 does not see."""

import json
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._format.packed import pack
from ckpt_core._format.record import FileRecord
from ckpt_core._save.agree import join_parts, size_and_crc
from tests.support.launch import launch, reports

PRELUDE = """
from ckpt_core import _processes
from ckpt_core._processes import wire

def state(step=0):
    return {"n": step, "x": np.arange(4) + step}

def keys():
    return [key for key, _ in _processes.coordination().client.key_value_dir_get("ckpt/")]
"""


def run(code: str, directory: Path) -> list[dict[str, Any]]:
    told = launch(PRELUDE + code, directory, devices=1)
    return reports(told)


CALLS = {
    "save and load": ("save", "load"),
    "load and load with broadcast": ("load", "broadcast"),
    "restore as a whole": ("restore", "atomic"),
    "save and delete": ("save", "delete"),
    "rollback and save": ("rollback", "save"),
    "save and restore_latest": ("save", "latest"),
    "local and not": ("local", "latest"),
}


def test_different_calls_at_one_moment(tmp_path):
    """A typed error on all that says which call each made."""
    told = run(
        f"cases = {CALLS!r}"
        """
import itertools
from dataclasses import replace
base = f"{directory}/base"
ckpt.save(base, state(), options=options)
like = {"n": 0, "x": np.zeros(4, int)}
number = 0
def steps():
    return ckpt.Checkpointer(f"{directory}/steps{number}", options=options, asynchronous=False)

def call(name):
    match name:
        case "save": ckpt.save(f"{directory}/one{number}", state(), options=options)
        case "load": ckpt.load(base, like, options=options)
        case "broadcast": ckpt.load(base, like, options=replace(options, broadcast=True))
        case "restore": ckpt.restore(base, state=like, options=options)
        case "atomic": ckpt.restore(base, state=like, options=replace(options, atomic_restore=True))
        case "delete": checkpointer.delete(0)
        case "rollback": checkpointer.rollback_to(0)
        case "latest": checkpointer.restore_latest(state=like)
        case "local": ckpt.Checkpointer(f"{directory}/l{number}", local_directory=f"{directory}-l")

failed, next_call = {}, {}
for number, (name, both) in enumerate(cases.items()):
    checkpointer = steps()
    checkpointer.save(0, state())
    failed[name] = raised(lambda: call(both[index]))
    # process 0 does not wait for who reads its decisions: it hears of the call that comes after them
    decided = {"latest": 1, "local": 2}.get(both[0], 0)
    for _ in range(max(1, decided) if index else not decided):
        path = f"{directory}/n{number}"
        next_call[name] = raised(lambda: ckpt.save(path, state(), options=options))
    meet(f"tried {number}")
    wire.rounds = lambda _, anew=itertools.count(100 * (number + 1)): anew  # together again
report(failed=failed, next_call=next_call)
""",
        tmp_path / "run",
    )
    for name in CALLS:
        errors = [process["failed"][name] for process in told]
        second = [process["next_call"].get(name) for process in told]
        for error in filter(None, errors + second):
            assert error["type"] == "NotTogether", (name, error)
            assert "the processes make different calls" in error["text"], (name, error)
        assert all(errors), (name, errors, second)


@pytest.mark.parametrize("wrong", ["", "passed", "size", "file"])
def test_what_process_0_does_not_see_is_no_checkpoint(tmp_path, wrong):
    attempt = PosixBackend().begin(str(tmp_path / "one"), overwrite=False, durable=False, token="t")
    attempt.write("state/a", b"1234")
    name, size = "state/c" if wrong == "file" else "state/a", 5 if wrong == "size" else 4
    passed = pack({"": json.dumps([[name, size, 7, 0]]).encode()})
    attempt.write("ckpt.passed_1", passed)
    parts = ["", size_and_crc(passed) + "1" * (wrong == "passed")]
    files: dict[str, FileRecord] = {}
    if wrong:
        with pytest.raises(ckpt.CheckpointError, match="do all processes see the same files"):
            join_parts(attempt, parts, files, {})
    else:
        join_parts(attempt, parts, files, {})
        assert files["state/a"].crc32 == 7 and not (tmp_path / "ckpt.passed_1").exists()
    attempt.abort()
