"""A message about a path that does not exist looks into few of the folders beside it, however many there are."""

from __future__ import annotations

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory.posix import PosixBackend
from tests.support import seams


def test_few_of_many_folders_are_looked_into(tmp_path, monkeypatch):
    for number in range(300):
        (tmp_path / f"run_{number:04}").mkdir()
    ckpt.save(tmp_path / "model_a", {"w": np.zeros(3)})
    looks: list[str] = []
    look = (PosixBackend, "is_checkpoint")
    seams.at(monkeypatch, look, before=lambda _, path: looks.append(path))
    with pytest.raises(ckpt.CheckpointNotFound, match="model_a"):
        ckpt.load(tmp_path / "model_b", as_numpy=True)
    assert 0 < len(looks) < 50
