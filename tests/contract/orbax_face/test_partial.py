"""``ocp.partial``: one checkpoint from several calls."""

from __future__ import annotations

import os
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_orbax import v1 as ocp


def test_parts_become_one_checkpoint(tmp_path: Any) -> None:
    path = tmp_path / "x"
    ocp.partial.save(
        path, {"a": {"w": jnp.ones((2, 3))}, "n": 3}, custom_metadata={"by": 1, "of": 2}
    )
    assert not path.exists()
    response = ocp.partial.save_async(path, {"a": {"b": np.arange(4)}}, custom_metadata={"by": 2})
    assert response.result() is None
    with pytest.raises(ckpt.CheckpointError, match="added already"):
        ocp.partial.save(path, {"n": 4})
    ocp.partial.finalize(path)
    found = ocp.load(path)
    assert (found["a"]["w"] == 1).all()
    assert found["a"]["b"].tolist() == [0, 1, 2, 3]
    assert found["n"] == 3
    assert ocp.metadata(path).custom_metadata == {"by": 2, "of": 2}
    assert ckpt.verify(path).ok
    assert os.listdir(tmp_path) == ["x"]


def test_orbax_reads_it(tmp_path: Any) -> None:
    theirs = pytest.importorskip("orbax.checkpoint").v1
    for part in {"a": {"w": np.arange(6.0)}}, {"a": {"b": np.ones(2)}, "n": 3}:
        ocp.partial.save(tmp_path / "x", part)
    ocp.partial.finalize(tmp_path / "x")
    found = theirs.load(tmp_path / "x")
    assert found["a"]["w"].tolist() == list(range(6))
    assert found["n"] == 3


def test_what_is_refused(tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError, match="was not called"):
        ocp.partial.finalize(tmp_path / "x")
    ocp.save(tmp_path / "x", {"w": np.ones(2)})
    with pytest.raises(ocp.errors.DestinationExistsError):
        ocp.partial.save(tmp_path / "x", {"w": np.ones(2)})
    with pytest.raises(ValueError, match="Unsupported leaf"):
        ocp.partial.save(tmp_path / "y", {"w": object()})
    ocp.partial.save(tmp_path / "z", {"w": np.ones(2)})
    ocp.save(tmp_path / "z", {"w": np.zeros(2)})
    with pytest.raises(ocp.errors.DestinationExistsError):
        ocp.partial.finalize(tmp_path / "z")
    assert ocp.load(tmp_path / "z")["w"].tolist() == [0, 0]
    assert sorted(os.listdir(tmp_path)) == ["x", "z"]
