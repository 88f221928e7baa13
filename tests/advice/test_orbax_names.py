"""What names of Orbax that are refused, and arguments that came with them, say to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import ckpt_core
import ckpt_orbax as ocp
from tests.advice.said import told

STATE = {"w": np.arange(4.0, dtype=np.float32)}


def run(directory: Path, steps: int, options: Any) -> list[int]:
    with ocp.CheckpointManager(directory, options=options) as manager:
        for step in range(steps):
            manager.save(step, args=ocp.args.StandardSave(STATE))
        manager.wait_until_finished()
        return manager.all_steps()


def written(said: Any, value: Any) -> Any:
    """The options that a message spells, with the value that it leaves open."""
    call = said.after("CheckpointManagerOptions(").partition(")), or")[0].rstrip(")")
    closed = call.replace("...", "value") + ")" * (call.count("(") + 1)
    return eval(
        f"ocp.CheckpointManagerOptions({closed}",
        {"ocp": ocp, "ckpt_core": ckpt_core, "value": value},
    )


def test_statistics_of_steps(tmp_path: Path):
    key = (
        "orbax/ckpt_orbax/_refused.py: CheckpointManagerOptions(engine=ckpt_core.Options(on_event="
    )
    with told(key, of=ImportError) as said:
        from ckpt_orbax.logging import step_statistics  # noqa: F401
    events: list[Any] = []
    run(tmp_path, 2, written(said, events.append))
    assert [event.step for event in events if event.kind == "committed"] == [0, 1]


def test_steps_that_evaluators_hold(tmp_path: Path):
    key = "orbax/ckpt_orbax/_refused.py: keep more steps: CheckpointManagerOptions(max_to_keep="
    with told(key, of=AttributeError) as said:
        ocp.checkpoint_utils.get_snapshot_dir_from_step_dir  # noqa: B018
    assert run(tmp_path, 5, written(said, 3)) == [2, 3, 4]


def test_standard_handlers_with_options(tmp_path: Path):
    key = "orbax/ckpt_orbax/v0/type_handlers.py: leave it at True; ckpt stores OCDBT"
    register = ocp.type_handlers.register_standard_handlers_with_options
    with told(key):
        register(use_ocdbt=False)
    register(use_ocdbt=True)
    ocp.PyTreeCheckpointer().save(tmp_path / "a", STATE)
    assert (tmp_path / "a" / "state" / "manifest.ocdbt").exists()
