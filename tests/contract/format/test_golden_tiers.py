"""Persistent directories of steps that were written before steps had lineages in their tokens.

The run went to step 6 on one host, with steps 0 and 4 in the persistent directory; its local parts are given up.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.format.release_golden import GOLDEN

EVERY_FOURTH = ckpt.Options(persist_policy=ckpt.when.every_steps(4), local_max_to_keep=2)


@pytest.fixture(name="root")
def make_root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "tiers", tmp_path / "tiers"))


def tree(value: int) -> dict[str, Any]:
    return {"w": np.full(3, value), "n": value}


def start(root: Path, local: str = "", **more: Any) -> ckpt.Checkpointer:
    if local:
        more |= {"local_directory": root / local, "options": EVERY_FOURTH}
    return ckpt.Checkpointer(root / "run", asynchronous=False, **more)


def found_by(root: Path) -> dict[int, int]:
    """All persistent steps that a reader finds; it goes on from the newest one."""
    with start(root, read_only=True) as reader:
        values = {step: int(reader.load(step)["n"]) for step in reader.all_steps()}
        restored = reader.restore_latest(state=tree(-1))
        assert restored is not None
        assert (restored.step, restored["state"]["n"]) == max(values.items())
        assert reader.inspect(max(values)).metadata == {"value": values[max(values)]}
    return values


def test_what_is_found(root):
    assert found_by(root) == {0: 0, 4: 4}
    for folder in (root / "run").rglob("ckpt.json"):
        assert ckpt.verify(folder.parent).ok, folder


@pytest.mark.parametrize("local", ["", "new"])
def test_it_goes_on(root, local):
    with start(root, local) as checkpointer:
        restored = checkpointer.restore_latest(state=tree(-1))
        assert restored is not None and restored["state"]["n"] == 4
        for step in (5, 6, 7, 8):
            assert checkpointer.save(step, tree(step), metadata={"value": step})
    new = [8] if local else [5, 6, 7, 8]
    assert found_by(root) == {0: 0, 4: 4} | {step: step for step in new}


@pytest.mark.parametrize("back", ["rollback", "restore"])
@pytest.mark.parametrize("local", ["", "new"])
def test_it_goes_back(root, back, local):
    with start(root, local) as checkpointer:
        if back == "rollback":
            assert checkpointer.rollback_to(0) == [4]
            assert found_by(root) == {0: 0}
        else:
            assert checkpointer.restore(0, state=tree(-1))["state"]["n"] == 0
        for step in (1, 2, 3, 4):
            assert checkpointer.save(step, tree(1000), metadata={"value": 1000})
    new = [4] if local else [1, 2, 3, 4]
    assert found_by(root) == {0: 0} | dict.fromkeys(new, 1000)
