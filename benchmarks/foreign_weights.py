"""Compares four ways of a safetensors file into jax arrays: ckpt, safetensors.flax, Orbax, mmap and device_put.

    python benchmarks/foreign_weights.py [--mib 512] [--tensor-mib 32] [--repeats 5] [--directory /dev/shm]

Each load is a new process that has loaded a small file in the same way, so that everything is imported and the devices
are initialized; the file is in the page cache. The ways take turns; prints a table of medians: seconds of the load, and
by how many MiB the process grew at most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("ckpt", "safetensors.flax", "orbax v1", "mmap + device_put")
CASES = {
    "one device": None,
    "8 devices, rows": ("data",),
    "8 devices, columns": (None, "data"),
}

CHILD = """
import json, mmap, resource, sys, time
import jax, jax.numpy as jnp, numpy as np
import ckpt_core as ckpt
import safetensors.flax

path, way, spec = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
names = json.loads(sys.argv[4])
if way == "orbax v1":
    from orbax.checkpoint import v1 as ocp
devices = np.array(jax.devices())
sharding = jax.sharding.SingleDeviceSharding(devices[0])
if spec is not None:
    mesh = jax.sharding.Mesh(devices, ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

def mapped(path, names):
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    length = int.from_bytes(memory[:8], "little")
    header = json.loads(memory[8 : 8 + length])
    data = np.frombuffer(memory, np.uint8)[8 + length :]
    for name in names:
        start, stop = header[name]["data_offsets"]
        array = data[start:stop].view(jnp.bfloat16).reshape(names[name])
        # may_alias would leave arrays that die with the file
        yield name, jax.device_put(array, sharding, may_alias=False)

def load(path, names):
    like = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        for name, shape in names.items()
    }
    if way == "ckpt":
        return ckpt.load(path, like)
    if way == "safetensors.flax":
        found = safetensors.flax.load_file(path)
        return found if spec is None else jax.device_put(found, sharding)
    if way == "orbax v1":
        with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
            return ocp.load(path, like)
    return dict(mapped(path, names))

jax.block_until_ready(load(path + ".small.safetensors", {"w": (8, 64)}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
loaded = jax.block_until_ready(load(path, names))
secs = time.perf_counter() - start
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
sums = {name: int(np.asarray(array[-1]).view(np.uint16).sum()) for name, array in loaded.items()}
assert all(array.dtype == jnp.bfloat16 for array in loaded.values())
print(json.dumps([secs, grown, sums]))
"""

WRITE = """
import sys
import ml_dtypes, numpy as np, safetensors.flax, jax
path, count, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(0)
tensors = {
    f"layers.{n}.weight": rng.integers(0, 2**15, (rows, 4096), np.uint16).view(ml_dtypes.bfloat16)
    for n in range(count)
}
safetensors.flax.save_file({k: jax.numpy.asarray(v) for k, v in tensors.items()}, path)
small = {"w": jax.numpy.ones((8, 64), jax.numpy.bfloat16)}
safetensors.flax.save_file(small, path + ".small.safetensors")
"""


def child(code: str, *arguments: object) -> str:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "XLA_FLAGS": flags.strip(),
            "JAX_PLATFORMS": "cpu",
        },
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    return result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensor-mib", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default=None, help="Where the file lies; default: TMPDIR.")
    arguments = parser.parse_args()
    rows = arguments.tensor_mib * 2**20 // (4096 * 2)
    count = arguments.mib // arguments.tensor_mib
    names = json.dumps({f"layers.{n}.weight": (rows, 4096) for n in range(count)})
    found: dict[tuple[str, str], list[list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        path = Path(folder) / "model.safetensors"
        child(WRITE, path, count, rows)
        for _ in range(arguments.repeats):
            for case, spec in CASES.items():
                sums: list[object] = []
                for way in WAYS:
                    told = child(CHILD, path, way, json.dumps(spec), names)
                    secs, grown, digest = json.loads(told.splitlines()[-1])
                    found.setdefault((case, way), []).append([secs, grown])
                    sums.append(digest)
                assert all(one == sums[0] for one in sums), "the ways loaded different values"
    print(f"| {arguments.mib} MiB of bfloat16 | " + " | ".join(WAYS) + " |")
    print("|---|" + "---|" * len(WAYS))
    for case in CASES:
        cells = [
            f"{statistics.median(secs for secs, _ in found[case, way]):.2f} s, "
            f"{statistics.median(grown for _, grown in found[case, way]):.0f} MiB"
            for way in WAYS
        ]
        print(f"| {case} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
