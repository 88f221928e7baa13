"""Compares two start-ups of a training script: restore then compile, and both at the same time.

    python benchmarks/startup_overlap.py [--mib 512] [--layers 24] [--repeats 5]

Each run is a new process that has imported everything and initialized its devices, like a script at
that point; it compiles without a cache. The two ways take turns; prints medians in seconds.
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
WAYS = ("load alone", "compile alone", "load, then compile", "load_async while compiling")

CHILD = """
import json, sys, time
import jax, jax.numpy as jnp
import ckpt_core as ckpt

path, way, layers, side = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
jax.config.update("jax_enable_compilation_cache", False)
jnp.zeros(1).block_until_ready()
ckpt.load(path + "-warm")

def loss(params, x):
    for number in range(layers):  # not scanned: every layer is compiled
        x = x + jnp.tanh(x @ params[f"layer{number:03}"]) * (1 + number)
    return (x**2).mean()

def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

abstract = {
    f"layer{n:03}": jax.ShapeDtypeStruct((side, side), jnp.float32) for n in range(layers)
}
batch = jax.ShapeDtypeStruct((8, side), jnp.float32)

def compiled():
    return jax.jit(step).lower(abstract, batch).compile()

start = time.perf_counter()
if way == "load alone":
    jax.block_until_ready(ckpt.load(path))
elif way == "compile alone":
    compiled()
elif way == "load, then compile":
    jax.block_until_ready(ckpt.load(path))
    compiled()
else:
    pending = ckpt.load_async(path)
    compiled()
    jax.block_until_ready(pending.result())
print(json.dumps(time.perf_counter() - start))
"""

SAVE = """
import sys
import jax.numpy as jnp
import ckpt_core as ckpt
path, layers, side = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ckpt.save(path, {f"layer{n:03}": jnp.full((side, side), n, jnp.float32) for n in range(layers)})
ckpt.save(path + "-warm", jnp.ones(8))
"""


def child(code: str, *arguments: object) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the parameters")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    side = int((arguments.mib * 2**20 / 4 / arguments.layers) ** 0.5)
    secs: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/step"
        child(SAVE, path, arguments.layers, side)
        for _ in range(arguments.repeats):
            for way in WAYS:
                secs[way].append(json.loads(child(CHILD, path, way, arguments.layers, side)))
    for way, found in secs.items():
        print(f"{way:28} {statistics.median(found):7.3f} s  ({min(found):.3f} to {max(found):.3f})")
    apart, together = (statistics.median(secs[way]) for way in WAYS[2:])
    print(f"overlapping saves {1 - together / apart:.0%} of the start-up")


if __name__ == "__main__":
    main()
