"""Trees of thousands of arrays: how they are written, and what that costs."""

import gc
import os
import resource

import jax
import numpy as np
import pytest

import ckpt_core as ckpt

COUNT = 4000


def tree(count: int = COUNT, elements: int = 512) -> dict[str, jax.Array]:
    rng = np.random.default_rng(count)
    values = rng.random((count, elements), np.float32)
    return {f"w{number}": jax.device_put(value) for number, value in enumerate(values)}


@pytest.mark.linux("open files are listed in /proc")
def test_a_load_that_an_index_stops_leaves_no_file_open(tmp_path):
    """Who goes back past damaged steps, or tries again and again, does not run out of descriptors."""
    ckpt.save(tmp_path / "a", tree(300, elements=4), options=ckpt.Options(durable=False))
    nodes = next((tmp_path / "a" / "state" / "d").iterdir())
    nodes.write_bytes(bytes(nodes.stat().st_size))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ckpt.CheckpointCorrupt, match="index of the array database"):
            ckpt.load(tmp_path / "a")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("text", [{"config": "{}"}, {"n": 3, "s": "x"}, {}])
def test_a_large_item_beside_one_without_arrays(tmp_path, text):
    """Items of text alone have no array database; a large item beside them must not look for one."""
    state = {"w": np.arange(1 << 18, dtype=np.float32)}
    ckpt.save(tmp_path / "a", model=state, notes=text)
    loaded = ckpt.load(tmp_path / "a")
    assert loaded["notes"] == text
    assert loaded["model"]["w"].tobytes() == state["w"].tobytes()
    assert ckpt.verify(tmp_path / "a").ok


@pytest.mark.parametrize("count", [3, 600])
def test_the_error_of_a_full_disk_says_of_which(tmp_path, count):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {f"w{n}": np.zeros(300) for n in range(count)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            ckpt.save(tmp_path / "c", state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(caught.value)
