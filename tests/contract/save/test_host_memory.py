"""The host memory that a save takes beyond the arrays, which Options.max_host_bytes bounds."""

from pathlib import Path

import pytest

from tests.support.units import MIB

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
