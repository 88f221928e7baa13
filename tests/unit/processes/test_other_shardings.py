"""Local steps after a restart with as many processes and other shardings: put together from the parts of all.

The persistent directory has step 0 alone, so whatever does not come from the local directories goes back to that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import launch, reports
from tests.unit.processes.test_lost_hosts import COMMON

ROWS, COLUMNS = 'P("data")', 'P(None, "data")'


def run(tmp_path: Path, code: str, processes: int = 2, devices: int = 2) -> list[dict[str, Any]]:
    ends = """
told["hidden"] = len(list(own.rglob(".ckpt-tmp.*")))
report(**told)
"""
    ended = launch(COMMON + code + ends, tmp_path / "run", processes=processes, devices=devices)
    told = reports(ended)
    assert not any(one.pop("hidden") for one in told)
    return told


def test_there_and_back(tmp_path: Path) -> None:
    """Twice in one program and in a new one; then training goes on with the other sharding, and back."""
    run(tmp_path, f"train(3, {ROWS})")
    code = f"""
told["columns"] = restored({COLUMNS})
told["again"] = restored({COLUMNS})
told["whole"] = restored(P())
told["rows"] = restored({ROWS})
train(5, {COLUMNS})
told["went on"] = restored({COLUMNS})
told["back"] = restored({ROWS})
"""
    for told in run(tmp_path, code):
        assert [*told.values()] == [[3, "local"]] * 4 + [[5, "local"]] * 2, told
    for told in run(tmp_path, f"told['new'] = restored({ROWS}), restored(P(None, None))"):
        assert told["new"] == [[5, "local"]] * 2


@pytest.mark.parametrize("harm", ["damage(3)", "lose()"])
def test_what_is_lost_or_damaged_comes_from_the_partner_first(tmp_path: Path, harm: str) -> None:
    run(tmp_path, f"train(3, {ROWS})")
    code = f"""
on(1, lambda: {harm})
told["columns"] = restored({COLUMNS})
"""
    for told in run(tmp_path, code):
        assert told["columns"] == [3, "local"]


def test_damage_of_what_another_process_needs(tmp_path: Path) -> None:
    """No partner has a copy: all go back together, and nothing of the damaged part is taken."""
    alone = """
def start(by, local=own, **more):
    options = ckpt.Options(timeout_secs=30, persist_policy=never)
    return ckpt.Checkpointer(persistent, local_directory=local, options=options, **more)

def settle(checkpointer):
    meet(f"turn{next(turns)}")
"""
    run(tmp_path, alone + f"train(3, {ROWS})")
    code = f"""
told["before"] = restored({COLUMNS})
on(1, lambda: damage(3))
told["columns"] = restored({COLUMNS})
told["rows"] = restored({ROWS})
"""
    for told in run(tmp_path, alone + code):
        assert told == {
            "before": [3, "local"],
            "columns": [0, "persistent"],
            "rows": [0, "persistent"],
        }


def test_values_of_each_process_are_not_put_together(tmp_path: Path) -> None:
    """Parts that differ in more than shards: which one would be right for a value of the host?"""
    code = f"""
def differing(step, by):
    return state(step, by) | {{"mine": ckpt.Json({{"index": index}})}}

with start({ROWS}) as checkpointer:
    for step in range(3):
        checkpointer.save(step, state=state(step, {ROWS}), mine=data())
        checkpointer.wait_until_finished()
with start({COLUMNS}) as checkpointer:
    iterator, error = data(), None
    try:
        found = checkpointer.restore_latest(state=state(99, {COLUMNS}), mine=iterator)
    except ckpt.CheckpointError as refused:
        error = refused
        found = checkpointer.restore(0, state=state(99, {COLUMNS}), mine=iterator)
    told["found"] = found.step, iterator.number
    told["error"] = [type(error).__name__, str(error)]
    told["local"] = sorted(int(path.name) for path in own.rglob("[0-9]*") if (path / "ckpt.json").exists())
"""
    pipeline = """
class Numbers:
    per_process = True
    def __init__(self, number):
        self.number, self.text = number, "x" * 200_000
    def get_state(self):
        return {"number": self.number, "text": self.text}
    def set_state(self, state):
        self.number = state["number"]

def data():
    return Numbers(index * 10)
"""
    for index, told in enumerate(run(tmp_path, pipeline + code)):
        assert told["found"] == [0, index * 10]  # states of this size are not sent to the others
        kind, text = told["error"]
        assert kind == "CheckpointError", text
        assert "step 2 is not damaged" in text, text
        assert "restore(step, ...)" in text, text
        assert 2 in told["local"], told  # until training has gone on from the older one
    small = pipeline.replace("200_000", "20")
    for index, told in enumerate(run(tmp_path / "small", small + code)):
        assert told["found"] == [2, index * 10]


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    run(tmp_path, f"train(3, {ROWS})", processes=4)
    code = f"""
on(2, lose)
told["columns"] = restored({COLUMNS})
train(4, {COLUMNS})
told["rows"] = restored({ROWS})
"""
    for told in run(tmp_path, code, processes=4):
        assert told == {"columns": [3, "local"], "rows": [4, "local"]}
