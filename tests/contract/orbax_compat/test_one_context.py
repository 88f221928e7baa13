"""The arrays of a checkpoint of Orbax are opened by several threads, through one context of TensorStore."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

import ckpt_core as ckpt
from ckpt_core.testing import assert_same


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_the_thread_that_plans_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_ocdbt: bool
) -> None:
    """Each further one would open the database again, with a cache of its own."""
    tree = {f"w{n}": np.full(8, n, np.float32) for n in range(20)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as checkpointer:
        checkpointer.save(tmp_path / "orbax", tree)
    made: list[str] = []
    plain = tensorstore.Context

    def counted(*arguments: Any) -> Any:
        if "cache_pool" in arguments[0]:
            made.append(threading.current_thread().name)
        return plain(*arguments)

    monkeypatch.setattr(tensorstore, "Context", counted)
    assert_same(ckpt.load(tmp_path / "orbax", as_numpy=True), tree)
    assert made == ["MainThread"]
