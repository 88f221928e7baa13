"""Persistent and local directories that were written before steps had lineages in their tokens.

The run went to step 6 on one host, with steps 0 and 4 in the persistent directory; that host went away, and the run
continued from step 4 on another one. Its steps 5 and 6 hold 105 and 106.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.format.release_golden import GOLDEN

EVERY_FOURTH = ckpt.Options(persist_policy=ckpt.when.every_steps(4), local_max_to_keep=2)
FOUND = {0: 0, 4: 4, 5: 105, 6: 106}


@pytest.fixture(name="root")
def make_root(tmp_path: Path) -> Path:
    """A copy at which the local folders are named as for this persistent directory."""
    root = tmp_path / "tiers"
    shutil.copytree(GOLDEN / "tiers", root)
    where = hashlib.sha256(str(root / "run").encode()).hexdigest()[:8]
    for host in ("host", "away"):
        (folder,) = (root / host).iterdir()
        folder.rename(folder.with_name(f"{folder.name.rpartition('-')[0]}-{where}"))
    return root


def start(root: Path, host: str = "host", **more: Any) -> ckpt.Checkpointer:
    local = root / host if host else None
    return ckpt.Checkpointer(
        root / "run", local_directory=local, options=EVERY_FOURTH, asynchronous=False, **more
    )


def save(checkpointer: ckpt.Checkpointer, step: int, value: int, **more: Any) -> None:
    assert checkpointer.save(step, tree(value), metadata={"value": value}, **more)


def resume(checkpointer: ckpt.Checkpointer, value: int) -> None:
    restored = checkpointer.restore_latest(state=tree(-1))
    assert restored is not None
    assert restored["state"]["n"] == value


def tree(value: int) -> dict[str, Any]:
    return {"w": np.full(3, value), "n": value}


def found_by(root: Path, host: str = "host") -> dict[int, int]:
    """All steps that a reader finds; it goes on from the newest one."""
    with start(root, host, read_only=True) as reader:
        values = {step: int(reader.load(step)["n"]) for step in reader.all_steps()}
        restored = reader.restore_latest(state=tree(-1))
        assert restored is not None
        assert (restored.step, restored["state"]["n"]) == max(values.items())
        assert reader.inspect(max(values)).metadata == {"value": values[max(values)]}
    return values


def test_what_is_found(root: Path) -> None:
    assert found_by(root) == FOUND
    assert found_by(root, "away") == {0: 0, 4: 4}, "its steps were left"
    assert found_by(root, "") == {0: 0, 4: 4}
    for folder in root.rglob("ckpt.json"):
        assert ckpt.verify(folder.parent).ok, folder


def test_it_goes_on(root: Path) -> None:
    with start(root) as checkpointer:
        resume(checkpointer, 106)
        for step in (7, 8, 9):
            save(checkpointer, step, step)
    assert found_by(root) == {0: 0, 4: 4, 8: 8, 9: 9}
    assert found_by(root, "away") == {0: 0, 4: 4, 8: 8}


def test_a_restart_before_a_new_step_is_persistent(root: Path) -> None:
    with start(root) as checkpointer:
        resume(checkpointer, 106)
        save(checkpointer, 7, 7)
    assert found_by(root) == {0: 0, 4: 4, 6: 106, 7: 7}, "an old step and a new one beside it"


@pytest.mark.parametrize("back", ["rollback", "restore"])
@pytest.mark.parametrize("to", [5, 4, 0])
def test_it_goes_back(root: Path, back: str, to: int) -> None:
    with start(root) as checkpointer:
        if back == "rollback":
            assert checkpointer.rollback_to(to) == [step for step in FOUND if step > to]
            assert found_by(root) == {step: n for step, n in FOUND.items() if step <= to}
        else:
            assert checkpointer.restore(to, state=tree(-1))["state"]["n"] == FOUND[to]
        save(checkpointer, to + 1, 1000)
    kept = {step: n for step, n in FOUND.items() if step <= to} | {to + 1: 1000}
    assert found_by(root) == kept
    persistent = {step: n for step, n in kept.items() if step % 4 == 0}
    assert found_by(root, "away") == persistent, "a host that was away brings nothing back"


def test_the_newest_is_deleted(root: Path) -> None:
    with start(root) as checkpointer:
        checkpointer.delete(6)
        assert checkpointer.all_steps() == [0, 4, 5]
    assert found_by(root) == {0: 0, 4: 4, 5: 105}


def test_a_step_is_replaced(root: Path) -> None:
    with start(root) as checkpointer:
        resume(checkpointer, 106)
        save(checkpointer, 6, 7, overwrite=True)
    assert found_by(root) == FOUND | {6: 7}


def test_the_host_that_was_away_goes_on(root: Path) -> None:
    """It continues from the persistent directory; its own left steps make way."""
    with start(root, "away") as checkpointer:
        resume(checkpointer, 4)
        save(checkpointer, 5, 205)
    assert found_by(root, "away") == {0: 0, 4: 4, 5: 205}
    assert found_by(root) == {0: 0, 4: 4}, "now this one's were left"
