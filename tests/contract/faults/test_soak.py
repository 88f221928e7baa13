"""Thousands of saves leave nothing behind: descriptors, threads, memory and files stay flat."""

import gc
import os
import threading

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import ckpt_core as ckpt

GROWTH_BYTES = 48 * 2**20
"""What the process may grow after the warm-up: allocators keep some of what they were given."""


@pytest.mark.parametrize(
    ("saves", "asynchronous"),
    [
        (150, True),
        (150, False),
        pytest.param(10_000, True, marks=pytest.mark.soak),
        pytest.param(10_000, False, marks=pytest.mark.soak),
    ],
)
def test_many_saves(tmp_path, saves, asynchronous):
    process = psutil.Process()
    state = {"w": jnp.arange(4096.0), "b": np.ones(7), "n": 0}
    options = ckpt.Options(durable=False)
    warm = saves // 3

    def measure() -> tuple[int, int, int, int]:
        gc.collect()
        files = sum(len(names) for _, _, names in os.walk(tmp_path))
        return process.num_fds(), threading.active_count(), files, process.memory_info().rss

    before = (0, 0, 0, 0)
    with ckpt.Checkpointer(
        tmp_path, max_to_keep=2, asynchronous=asynchronous, options=options
    ) as checkpointer:
        for step in range(saves):
            state["n"] = step
            assert checkpointer.save(step, state, metrics={"loss": 1 / (step + 1)})
            if step % 50 == 7:
                assert checkpointer.restore_latest(state=state)["state"]["n"] == step
            if step == warm:
                checkpointer.wait_until_finished()
                before = measure()
        checkpointer.wait_until_finished()
        after = measure()
        assert checkpointer.all_steps() == [saves - 2, saves - 1]
    assert after[0] <= before[0] + 2, "file descriptors"
    assert after[1] <= before[1], "threads"
    assert after[2] == before[2], "files"
    assert after[3] <= before[3] + GROWTH_BYTES, "memory"
