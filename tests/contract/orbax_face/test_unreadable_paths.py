"""What the system cannot look at now is not taken for absent: a training that has steps does not begin anew."""

import errno
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_orbax as ocp
from ckpt_orbax import flax_checkpoints, v1 as ocp_v1
from tests.support.refusals import refuse

TARGET = {"w": np.zeros(2)}


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    flax_checkpoints.save_checkpoint(directory, {"w": np.ones(2)}, 3)
    return directory


@pytest.mark.parametrize(
    ("where", "number"), [("", errno.EACCES), ("checkpoint_3", errno.EIO), ("", errno.ESTALE)]
)
def test_flax_restores_nothing_and_says_so(steps, monkeypatch, number, where):
    refuse(monkeypatch, steps / where, number)
    for call in (
        lambda: flax_checkpoints.restore_checkpoint(steps, TARGET),
        lambda: flax_checkpoints.restore_checkpoint(steps, TARGET, step=3),
        lambda: flax_checkpoints.latest_checkpoint(steps),
        lambda: flax_checkpoints.available_steps(steps),
    ):
        with pytest.raises(OSError) as raised:
            call()
        assert raised.value.errno == number


def test_what_is_absent_stays_absent(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file" / "below", tmp_path / ("long" * 100)):
        assert flax_checkpoints.restore_checkpoint(path, TARGET) is TARGET
        assert ocp.utils.checkpoint_steps(path) == []
        assert not ocp.utils.is_checkpoint_finalized(path)
    assert not ocp_v1.is_orbax_checkpoint(tmp_path / "file")


LOOKS: dict[str, Any] = {
    "checkpoint_steps": ocp.utils.checkpoint_steps,
    "is_checkpoint_finalized": ocp.utils.is_checkpoint_finalized,
    "is_orbax_checkpoint": ocp_v1.is_orbax_checkpoint,
}


@pytest.mark.parametrize(
    ("look", "number"), list(zip(LOOKS, itertools.cycle([errno.EACCES, errno.EIO])))
)
def test_questions_about_a_path(steps, monkeypatch, look, number):
    refuse(monkeypatch, steps, number)
    with pytest.raises(OSError) as raised:
        LOOKS[look](steps)
    assert raised.value.errno == number


def test_the_metadata_of_a_run(tmp_path, monkeypatch):
    with ocp.CheckpointManager(tmp_path, metadata={"a": 1}) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.ones(2)}))
    refuse(monkeypatch, tmp_path / "metadata")
    with pytest.raises(PermissionError):
        ocp.CheckpointManager(tmp_path, metadata={"a": 2})
