"""What names of Orbax that are refused, and arguments that came with them, say to write instead."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core
import ckpt_orbax as ocp
from tests.contract.advice.said import logged, told

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


def test_steps_of_flax_that_are_not_newer(tmp_path: Path):
    from ckpt_orbax import flax_checkpoints

    flax_checkpoints.save_checkpoint(tmp_path, STATE, 5)
    key = "orbax/ckpt_orbax/flax_checkpoints.py: overwrite=True, which deletes the steps after"
    with told(key) as said:
        flax_checkpoints.save_checkpoint(tmp_path, STATE, 3)
    how = eval(f"dict({said.between('save with ', ', which')})")
    flax_checkpoints.save_checkpoint(tmp_path, STATE, 3, **how)
    assert flax_checkpoints.available_steps(tmp_path) == [3]


def test_what_flax_saves_alone(tmp_path: Path):
    from ckpt_orbax import flax_checkpoints

    key = "orbax/ckpt_orbax/flax_checkpoints.py: : put it into a dict"
    with told(key):
        flax_checkpoints.save_checkpoint(tmp_path, STATE["w"], 5)
    flax_checkpoints.save_checkpoint(tmp_path, {"w": STATE["w"]}, 5)
    restored = flax_checkpoints.restore_checkpoint(tmp_path, {"w": STATE["w"] * 0})
    assert np.array_equal(restored["w"], STATE["w"])


def test_transforms_of_flax(tmp_path: Path):
    from ckpt_orbax import flax_checkpoints

    path = flax_checkpoints.save_checkpoint(tmp_path, STATE, 5)
    target = {"v": STATE["w"] * 0}
    key = "orbax/ckpt_orbax/flax_checkpoints.py: ckpt_core.load(path, target, rename="
    with told(key) as said:
        flax_checkpoints.restore_checkpoint(tmp_path, target, orbax_transforms={"v": "w"})
    call = said.after("Instead: ").replace("...", "{'w': 'v'}")
    restored = eval(call, {"ckpt_core": ckpt_core, "path": path, "target": target})
    assert np.array_equal(restored["v"], STATE["w"])


def test_a_run_of_orbax_that_shall_go_back(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Who reads its log before the first save of one's own is not told by Orbax that nothing fits."""
    theirs = pytest.importorskip("orbax.checkpoint")
    state, args = {"w": np.arange(3.0)}, theirs.args
    for name in ("positional", "as said"):
        with theirs.CheckpointManager(tmp_path / name) as manager:
            manager.save(3, args=args.StandardSave(state))
        with (
            caplog.at_level(logging.INFO, "ckpt_core"),
            ckpt_core.Checkpointer(tmp_path / name) as run,
        ):
            restored = run.restore_latest(state)
            said = logged("_saved/opening.py: : to go back to it, save with save(step, ", caplog)
            assert restored is not None
            if name == "positional":
                run.save(4, restored.state)
            else:
                named = said.between("save with save(step, ", ")")
                eval(f"run.save(4, {named})", {"run": run, "state": restored.state})
        with theirs.CheckpointManager(tmp_path / name) as manager:
            if name == "positional":
                with pytest.raises(ValueError, match="Must provide `args` of type `Composite`"):
                    manager.restore(4, args=args.StandardRestore(state))
            else:
                found = manager.restore(4, args=args.StandardRestore(state))
                assert found["w"].tolist() == [0, 1, 2]
