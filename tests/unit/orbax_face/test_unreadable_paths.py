"""What the system cannot look at now is not taken for absent: a training that has steps does not begin anew."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_orbax as ocp
from ckpt_orbax import flax_checkpoints, test_utils
from ckpt_orbax import v1 as ocp_v1
from ckpt_orbax._paths import refuse_another_series
from ckpt_orbax.path import format_utils
from tests.support.refusals import refuse

TARGET = {"w": np.zeros(2)}


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A directory with one step of Flax' name."""
    directory = tmp_path / "run"
    flax_checkpoints.save_checkpoint(directory, {"w": np.ones(2)}, 3)
    return directory


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("where", ["", "checkpoint_3"])
def test_flax_restores_nothing_and_says_so(
    steps: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
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


def test_flax_restores_one_checkpoint_that_it_may_not_look_at(
    steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = steps / "checkpoint_3"
    refuse(monkeypatch, one / "ckpt.json", calls=("stat", "lstat", "open", "builtins.open"))
    with pytest.raises(PermissionError):
        flax_checkpoints.restore_checkpoint(one, TARGET)


def test_what_is_absent_stays_absent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file" / "below", tmp_path / ("long" * 100)):
        assert flax_checkpoints.restore_checkpoint(path, TARGET) is TARGET
        assert ocp.utils.checkpoint_steps(path) == []
        assert not ocp.utils.is_checkpoint_finalized(path)
        assert not format_utils.is_pytree_checkpoint(path)
    assert not ocp_v1.is_orbax_checkpoint(tmp_path / "file")


LOOKS: dict[str, Any] = {
    "checkpoint_steps": ocp.utils.checkpoint_steps,
    "any_checkpoint_step": ocp.utils.any_checkpoint_step,
    "tmp_checkpoints": ocp.utils.tmp_checkpoints,
    "is_checkpoint_finalized": ocp.utils.is_checkpoint_finalized,
    "is_orbax_checkpoint": ocp_v1.is_orbax_checkpoint,
    "is_ocdbt_checkpoint": format_utils.is_ocdbt_checkpoint,
    "is_pytree_checkpoint": format_utils.is_pytree_checkpoint,
    "empty_directory": test_utils.empty_directory,
    "erase_and_create_empty": test_utils.erase_and_create_empty,
    "refuse_another_series": lambda path: refuse_another_series(str(path), "checkpoint"),
}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("look", LOOKS)
def test_questions_about_a_path(
    steps: Path, monkeypatch: pytest.MonkeyPatch, look: str, number: int
) -> None:
    refuse(monkeypatch, steps, number)
    with pytest.raises(OSError) as raised:
        LOOKS[look](steps)
    assert raised.value.errno == number


def test_steps_whose_names_begin_otherwise(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, steps / "checkpoint_3")
    with pytest.raises(PermissionError):
        refuse_another_series(str(steps), "other")


@pytest.mark.parametrize("where", ["", "metadata"])
def test_what_orbax_wrote_with_one_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metadata").write_text('{"a": 1}')
    checkpointer = ocp.Checkpointer(ocp.JsonCheckpointHandler())
    assert checkpointer.restore(tmp_path / "one") == {"a": 1}
    refuse(monkeypatch, tmp_path / "one" / where, calls=("stat",), below=False)
    with pytest.raises(PermissionError):
        checkpointer.restore(tmp_path / "one")


def test_a_step_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ocp.PyTreeCheckpointer().save(tmp_path / "7", {"w": np.ones(2)})
    names = ocp_v1.path.step.standard_name_format()
    assert [one.step for one in names.find_all(tmp_path)] == [7]
    refuse(monkeypatch, tmp_path / "7", calls=("stat",), below=False)
    with pytest.raises(PermissionError):
        list(names.find_all(tmp_path))


def test_the_metadata_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ocp.CheckpointManager(tmp_path, metadata={"a": 1}) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.ones(2)}))
    refuse(monkeypatch, tmp_path / "metadata", calls=("stat",))
    with pytest.raises(PermissionError):
        ocp.CheckpointManager(tmp_path, metadata={"a": 2})
