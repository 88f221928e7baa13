"""Compares four ways of a safetensors file into jax arrays: python benchmarks/foreign_weights.py

ckpt, safetensors.flax, Orbax, and mmap with device_put. Each load is a new process that has loaded a small file in the same
way, so that everything is imported and the devices are initialized; the file is in the page cache. The ways take turns; prints
a table of medians: seconds of the load, and by how many MiB the process grew at most.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared import MIB, fresh, in_turn, middle, options, table, timed

WAYS = ("ckpt", "safetensors.flax", "orbax v1", "mmap + device_put")
CASES = {"one device": None, "8 devices, rows": ("data",), "8 devices, columns": (None, "data")}
WIDTH = 4096


def save(path: str, count: int, rows: int) -> None:
    import jax
    import ml_dtypes
    import numpy as np
    from safetensors.flax import save_file

    rng = np.random.default_rng(0)
    tensors = {
        f"layers.{n}.weight": rng.integers(0, 2**15, (rows, WIDTH), np.uint16).view(
            ml_dtypes.bfloat16
        )
        for n in range(count)
    }
    save_file({name: jax.numpy.asarray(values) for name, values in tensors.items()}, path)
    save_file({"w": jax.numpy.ones((8, 64), jax.numpy.bfloat16)}, f"{path}.small.safetensors")


def load(path: str, way: str, shapes: Mapping[str, Any], sharding: Any, cut: bool) -> Any:
    import jax
    import jax.numpy as jnp

    like = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        for name, shape in shapes.items()
    }
    if way == "ckpt":
        import ckpt_core as ckpt

        return ckpt.load(path, like)
    if way == "safetensors.flax":
        from safetensors.flax import load_file

        return jax.device_put(load_file(path), sharding) if cut else load_file(path)
    if way == "orbax v1":
        from orbax.checkpoint import v1 as ocp

        with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
            return ocp.load(path, like)
    return mapped(path, shapes, sharding)


def mapped(path: str, shapes: Mapping[str, Any], sharding: Any) -> dict[str, Any]:
    import jax
    import numpy as np

    memory = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(memory[:8].tobytes(), "little")
    header = json.loads(memory[8 : 8 + length].tobytes())
    found = {}
    for name, shape in shapes.items():
        start, stop = header[name]["data_offsets"]
        array = memory[8 + length + start : 8 + length + stop].view(jax.numpy.bfloat16)
        # may_alias would leave arrays that die with the file
        found[name] = jax.device_put(array.reshape(shape), sharding, may_alias=False)
    return found


def measure(path: str, way: str, spec: list[str | None] | None, shapes: dict[str, Any]) -> Any:
    """Seconds, MiB by which the process grew, and sums of what was loaded."""
    import resource

    import jax
    import numpy as np

    devices = np.array(jax.devices())
    sharding: Any = jax.sharding.SingleDeviceSharding(devices[0])
    if spec is not None:
        mesh = jax.sharding.Mesh(devices, ("data",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    cut = spec is not None
    small = load(f"{path}.small.safetensors", way, {"w": (8, 64)}, sharding, cut)
    jax.block_until_ready(small)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    secs, loaded = timed(lambda: jax.block_until_ready(load(path, way, shapes, sharding, cut)))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert all(array.dtype == jax.numpy.bfloat16 for array in loaded.values())
    sums = {name: int(np.asarray(x[-1]).view(np.uint16).sum()) for name, x in loaded.items()}
    return secs, grown, sums


def main() -> None:
    given = options(__doc__, mib=512, tensor_mib=32, repeats=5)
    rows, count = given.tensor_mib * MIB // (WIDTH * 2), given.mib // given.tensor_mib
    shapes = {f"layers.{n}.weight": (rows, WIDTH) for n in range(count)}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        path = Path(folder) / "model.safetensors"
        fresh(save, path, count, rows, **environment)

        def one(case: str, way: str) -> list[Any]:
            return fresh(measure, path, way, CASES[case], shapes, **environment)

        pairs = itertools.product(CASES, WAYS)
        found = in_turn(pairs, given.repeats, lambda pair: one(*pair))
    cells: dict[tuple[str, str], str] = {}
    for pair, runs in found.items():
        secs, grown, sums = zip(*runs, strict=True)
        assert all(one == found[pair[0], WAYS[0]][0][2] for one in sums), (
            "the ways loaded different values"
        )
        cells[pair] = f"{middle(secs):.2f} s, {middle(grown):.0f} MiB"
    lines = {case: [cells[case, way] for way in WAYS] for case in CASES}
    table((f"{given.mib} MiB of bfloat16", *WAYS), lines)


if __name__ == "__main__":
    main()
