"""Measures the resident memory of saves and loads, in multiples of the state: python benchmarks/memory.py

    python benchmarks/memory.py [--gib 2] [--only save,load,...] [--directory .]

Each case is a new process that has done the same with a small state before, so that everything is imported; the peak is
that of the whole process (``VmHWM``, which begins anew right before the measured call), less what it held before. For a load
the state itself is new memory, so 1.00 is the least; for a save, and for a restore into objects that have their values, 0.00 is.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

COMMON = """
import gc, json, sys
import numpy as np, jax, jax.numpy as jnp
import ckpt_core as ckpt

folder, case, count, side = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])

def told(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))

def measured(work):
    gc.collect()
    before = told("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    result = work()
    return told("VmHWM") - before, result

def state(count, side):
    random = np.random.default_rng(0)
    return {f"w{n:03}": jnp.asarray(random.standard_normal((side, side), np.float32)) for n in range(count)}

def nnx_model(count, side, abstract=False):
    from flax import nnx
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(side, side, use_bias=False, rngs=rngs) for _ in range(count)])
    make = lambda: Model(nnx.Rngs(0))
    return nnx.eval_shape(make) if abstract else make()

def keras_model(count, side):
    import os
    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    return keras.Sequential([keras.Input((side,)), *[keras.layers.Dense(side, use_bias=False) for _ in range(count)]])

def torch_model(count, side, device=None):
    import torch
    return torch.nn.Sequential(*[torch.nn.Linear(side, side, bias=False, device=device) for _ in range(count)])
"""

RESTORE = """
for n, s, name in ((2, 64, "small-KIND"), (count, side, "KIND")):
    model = MAKE
    ckpt.save(f"{folder}/{name}", model=model, overwrite=True)
    grown, _ = measured(lambda: ckpt.restore(f"{folder}/{name}", model=model))
"""
TORCHAX = """
from ckpt_torchax import shim
shim.install()
import torchax, ckpt_torchax
torchax.enable_globally()
"""


def restore(kind: str, make: str) -> str:
    """The code of a restore into an object that holds its values."""
    return RESTORE.replace("KIND", kind).replace("MAKE", make)


CASES = {
    "save": """
for n, s, name in ((2, 64, "small"), (count, side, "plain")):
    tree = state(n, s)
    grown, _ = measured(lambda: ckpt.save(f"{folder}/{name}", tree, overwrite=True))
""",
    "load": """
for name in ("small", "plain"):
    grown, tree = measured(lambda: jax.block_until_ready(ckpt.load(f"{folder}/{name}")))
""",
    "load, cast to bfloat16": """
for n, s, name in ((2, 64, "small"), (count, side, "plain")):
    like = {f"w{k:03}": jax.ShapeDtypeStruct((s, s), jnp.bfloat16) for k in range(n)}
    grown, tree = measured(lambda: jax.block_until_ready(ckpt.load(f"{folder}/{name}", like, cast=True)))
""",
    "restore into an NNX model": restore("nnx", "nnx_model(n, s)"),
    "restore into an abstract NNX model": """
for n, s, name in ((2, 64, "small-nnx"), (count, side, "nnx")):
    model = nnx_model(n, s, abstract=True)
    grown, _ = measured(lambda: ckpt.restore(f"{folder}/{name}", model=model))
""",
    "restore into a Keras model": restore("keras", "keras_model(n, s)"),
    "restore into a torchax module": TORCHAX + restore("torchax", "torch_model(n, s).to('jax')"),
    "load into a torchax module on the meta device": TORCHAX
    + """
for n, s, name in ((2, 64, "small-torchax"), (count, side, "torchax")):
    model = torch_model(n, s, "meta")
    grown, _ = measured(lambda: ckpt_torchax.load_into(f"{folder}/{name}", model))
""",
}
LAST = """
print(json.dumps(grown))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=2, help="size of the state")
    parser.add_argument("--leaf-mib", type=float, default=64)
    parser.add_argument("--only", default=",".join(CASES).replace(", ", " "))
    parser.add_argument("--directory", default=None, help="where checkpoints are")
    arguments = parser.parse_args()
    side = int((arguments.leaf_mib * 2**20 / 4) ** 0.5)
    count = max(1, round(arguments.gib * 1024 / arguments.leaf_mib))
    paths = [ROOT, *(ROOT / "integrations").iterdir(), *filter(None, sys.path)]
    print("| case | new resident memory at the peak, of the state |\n|---|---:|")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        for case, code in CASES.items():
            if case.replace(", ", " ") not in arguments.only.split(","):
                continue
            done = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    COMMON + code + LAST,
                    folder,
                    case,
                    str(count),
                    str(side),
                ],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            )
            grown = json.loads(done.stdout.splitlines()[-1])
            print(f"| {case} | {grown / (count * side * side * 4):.3f} |", flush=True)


if __name__ == "__main__":
    main()
