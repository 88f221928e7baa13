"""A version of jax without the private names that ckpt uses: one process goes on, several are told."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt


@pytest.fixture(autouse=True)
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax._src.distributed", None)
    import jax._src

    monkeypatch.delattr(jax._src, "distributed", raising=False)


def test_one_process_needs_no_coordination(tmp_path):
    with ckpt.Checkpointer(tmp_path) as run:
        run.save(1, {"w": jnp.arange(3)})
        assert not run.reached_preemption(1)
        found = run.restore_latest({"w": jnp.zeros(3, int)})
    assert found is not None and np.array_equal(found["state"]["w"], [0, 1, 2])


def test_several_processes_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda *_: 2)
    with pytest.raises(ckpt.CheckpointError, match="no coordination service where ckpt looks"):
        ckpt.save(tmp_path / "a", {"w": jnp.arange(3)})
    assert not (tmp_path / "a").exists()
