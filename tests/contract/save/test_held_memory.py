"""The host memory that a save takes beyond the arrays, and what is still alive after a call has ended, well or not."""

import gc
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import seams
from tests.support.own import Own
from tests.support.units import MIB

QUICK = ckpt.Options(durable=False)
LONG_SECS = 60


def state() -> tuple[dict[str, Any], list[Any]]:
    """A state, and weak references to what it is made of."""
    arrays = {"jax": jnp.ones(50_000) * 2, "numpy": np.ones(50_000)}
    small = {"jax": jnp.ones(3) * 3, "numpy": np.ones(3)}
    tree = {"large": arrays, "small": small}
    return tree, [weakref.ref(leaf) for part in tree.values() for leaf in part.values()]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.at(monkeypatch, "record", before=seams.fail(OSError, 28, "the disk is full"))


def assert_gone(references: list[Any]) -> None:
    gc.collect()
    alive = [reference() for reference in references if reference() is not None]
    if alive:  # of what tests/conftest.py froze no referrer is named
        gc.unfreeze()
    assert not alive, [gc.get_referrers(value) for value in alive]


def _begun(tree: Any, checkpointer: ckpt.Checkpointer) -> Callable[[], Any]:
    checkpointer.save(0, tree)
    return checkpointer.wait_until_finished


ON_DEVICE = ckpt.Options(durable=False, snapshot="device")
SAVES: dict[str, Callable[[Path, Any], Callable[[], Any]]] = {
    "save_async": lambda path, tree: ckpt.save_async(path, tree, options=QUICK).result,
    "on the device": lambda path, tree: ckpt.save_async(path, tree, options=ON_DEVICE).result,
    "Checkpointer": lambda path, tree: _begun(tree, ckpt.Checkpointer(path, options=QUICK)),
    "tiers": lambda path, tree: _begun(
        tree, ckpt.Checkpointer(path / "far", local_directory=path / "near", options=QUICK)
    ),
}


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("how", SAVES)
def test_a_save_that_ended_holds_nothing(how, fails, tmp_path, request):
    if fails:
        request.getfixturevalue("full_disk")
    tree, references = state()
    wait = SAVES[how](tmp_path / "a", tree)
    del tree
    with pytest.raises(OSError, match="the disk is full") if fails else nullcontext():
        wait()
    assert_gone(references)  # though whoever waited, and could wait again, is still there
    assert wait


def test_a_failure_that_nobody_asked_about_holds_no_arrays(full_disk, tmp_path):
    tree, references = state()
    pending = ckpt.save_async(tmp_path / "a", tree, options=QUICK)
    del tree
    end = time.monotonic() + LONG_SECS
    while not pending.done():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert_gone(references)
    with pytest.raises(OSError, match="the disk is full") as caught:
        pending.result()
    frames = "".join(str(entry) for entry in caught.traceback)
    assert "ckpt_core" in frames  # where it happened is still known
    with pytest.raises(OSError, match="the disk is full"):
        pending.result()  # and raised again for whoever asks again


def test_what_was_loaded_belongs_to_the_caller(tmp_path):
    """And the target of a load, once it has ended."""
    ckpt.save(tmp_path / "a", {"w": jnp.ones(50_000)}, options=QUICK)
    like = {"w": jnp.zeros(50_000)}
    pending = ckpt.load_async(tmp_path / "a", like)
    loaded = pending.result()
    references = [weakref.ref(like["w"])]
    del like
    assert_gone(references)
    references = [weakref.ref(loaded["w"])]
    del pending, loaded
    assert_gone(references)


def test_a_model_is_not_kept_alive(tmp_path):
    owner = Own(w=jnp.ones(1000))
    references = [weakref.ref(owner)]
    ckpt.save(tmp_path / "one", model=owner)
    del owner
    assert_gone(references)


def test_saves_and_loads_leave_no_objects_behind(tmp_path):
    """TensorStore's own decoding left 8 objects for each leaf of every save and load, for ever."""
    leaves = 300
    state = {f"w{number}": jnp.ones(100) for number in range(leaves)}

    def work(turn: int) -> None:
        ckpt.save(tmp_path / str(turn), state)
        ckpt.load(tmp_path / str(turn))
        gc.collect()

    for turn in range(3):
        work(turn)
    before = sys.getallocatedblocks()
    for turn in range(3, 13):
        work(turn)
    assert sys.getallocatedblocks() - before < leaves


if not Path("/proc/self/clear_refs").exists():
    pytest.skip("the peak of memory is told by Linux", allow_module_level=True)

# Runs in an interpreter of its own, whose peak is that of this save alone.
PEAK = """
import json, sys
import jax
import jax.numpy as jnp
import numpy as np
import ckpt_core as ckpt

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))

directory, kind, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
packed = {"compression": "zstd", "chunk_bytes": 4 << 20} if kind == "packed" else {}
options = ckpt.Options(max_host_bytes=limit, **packed)
if kind == "packed":  # of which compression makes little less
    tree = {"w": jax.random.normal(jax.random.key(0), (64, 1024, 1024))}
elif kind == "large":
    tree = {"w": jnp.ones((64, 1024, 1024)), "n": np.ones((32, 1024, 1024), np.float32)}
else:
    tree = {f"leaf{i:05}": jnp.full(2048, i, jnp.float32) for i in range(24000)}
jax.block_until_ready(tree)
# threads, caches and imports; too small to leave freed memory behind that would hide the peak
ckpt.save(directory + "/warm", {"a": jnp.ones(3), "b": np.ones(100_000)}, options=options)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is counted from here
before = status("VmRSS")
ckpt.save(directory + "/x", tree, options=options)
peak = status("VmHWM")
print(json.dumps({"extra": peak - before}))
"""


@pytest.mark.parametrize(
    ("kind", "limit", "most"),
    [
        ("large", 8 * MIB, 64 * MIB),  # smaller than any chunk
        ("small", 16 * MIB, 64 * MIB + 16 * MIB),
        ("packed", 16 * MIB, 64 * MIB + 16 * MIB),  # one array, larger than the limit
    ],
)
def test_saving_takes_little_memory_beyond_the_arrays(run_python, tmp_path, kind, limit, most):
    """The large arrays are 384 MiB, written from their own memory; the others 188 and 256 MiB."""
    found = run_python(PEAK, str(tmp_path), kind, str(limit))
    print(f"{kind}: {found['extra'] / MIB:.0f} MiB beyond the arrays")
    assert found["extra"] < most, f"{found['extra'] / MIB:.0f} MiB"
