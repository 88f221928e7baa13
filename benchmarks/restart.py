"""Compares restarts: a new process, from its start until the state is loaded and the first step is done.

    python benchmarks/restart.py [--gib 0.5] [--leaf-mib 32] [--repeats 4] [--directory .] [--only ckpt,disk]

Every case is a new process, with its imports; the cases take turns, with the files in the page cache (warm) and not
(cold: `drop_caches` where that is allowed, else `posix_fadvise`). Two floors run in the same turns: `disk` reads the files with
large parallel reads into memory that it used before, and `memory` touches as much fresh memory for the first time. What
a load cannot beat is the slower of the two. Prints tables of medians with minimum and maximum.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("ckpt", "safetensors", "orbax", "orbax uncompressed", "torch")
FLOORS = ("disk", "memory")
PHASES = ("import", "load", "step")

SAVE = """
import sys
import jax, jax.numpy as jnp, numpy as np
folder, leaves, side = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
random = np.random.default_rng(0)
tree = {f"layer{n:03}": random.standard_normal((side, side), np.float32) for n in range(leaves)}
tree = jax.tree.map(jnp.asarray, tree)
way = sys.argv[4]
if way == "ckpt":
    import ckpt_core as ckpt
    ckpt.save(f"{folder}/ckpt", tree)
elif way == "safetensors":
    from safetensors.flax import save_file
    save_file(tree, f"{folder}/safetensors")
elif way == "torch":
    import torch
    torch.save({n: torch.from_numpy(np.array(x)) for n, x in tree.items()}, f"{folder}/torch")
else:
    from orbax.checkpoint import v1 as ocp
    zstd = way == "orbax"
    saving = ocp.options.ArrayOptions.Saving(use_compression=zstd)
    with ocp.Context(array_options=ocp.options.ArrayOptions(saving=saving)):
        ocp.save(f"{folder}/{way}", tree)
"""

# `began` is the moment at which the parent started the process.
LOAD = """
import json, sys, time
began, folder, way, leaves, side = float(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:6])
path = f"{folder}/{way}"
import jax, jax.numpy as jnp
like = {f"layer{n:03}": jax.ShapeDtypeStruct((side, side), jnp.float32) for n in range(leaves)}
if way == "ckpt":
    import ckpt_core as ckpt
    load = lambda: ckpt.load(path)
elif way == "safetensors":
    from safetensors.flax import load_file
    load = lambda: load_file(path)
elif way == "torch":
    import torch
    load = lambda: torch.load(path)
else:
    from orbax.checkpoint import v1 as ocp
    load = lambda: ocp.load(path, like)
imported = time.time()
tree = load()
if way != "torch":
    jax.block_until_ready(tree)
loaded = time.time()
if way == "torch":  # no jax array is made of them: the cheapest thing that torch can do
    grown = sum(float((x * 0.999)[0, 0]) for x in tree.values())
else:
    step = jax.jit(lambda t: jax.tree.map(lambda x: x * 0.999, t), donate_argnums=0)
    grown = jax.block_until_ready(step(tree))
stepped = time.time()
print(json.dumps([imported - began, loaded - imported, stepped - loaded]))
"""

DISK = """
import json, os, sys, threading, time
began, folder, way, leaves, side = float(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:6])
import numpy as np
imported = time.time()
if way == "disk":
    files = [os.path.join(d, f) for d, _, fs in os.walk(f"{folder}/ckpt") for f in fs]
    step = 8 * 2**20
    reads = [(f, o) for f in files for o in range(0, os.path.getsize(f), step)]
    lock = threading.Lock()
    def work():
        buffer = bytearray(step)
        opened = {}
        while True:
            with lock:
                if not reads:
                    return
                file, offset = reads.pop(0)
            if file not in opened:
                opened[file] = os.open(file, os.O_RDONLY)
            os.preadv(opened[file], [buffer], offset)
    count = 4
else:
    memory = [np.empty((side, side), np.float32) for _ in range(leaves)]
    parts = iter(memory)
    lock = threading.Lock()
    def work():
        while True:
            with lock:
                part = next(parts, None)
            if part is None:
                return
            part.reshape(-1)[::1024] = 0
    count = os.cpu_count()
threads = [threading.Thread(target=work) for _ in range(count)]
for thread in threads: thread.start()
for thread in threads: thread.join()
loaded = time.time()
print(json.dumps([imported - began, loaded - imported, 0.0]))
"""


def child(code: str, *arguments: object) -> str:
    """What a new process prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their byte code
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return result.stdout


def forget(folder: str) -> str:
    """Takes the files out of the page cache; gives how."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return "drop_caches"
    except OSError:
        pass
    for file in Path(folder).rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return "posix_fadvise"


def remember(folder: str, way: str) -> None:
    """Reads the files of a case, so that they are in the page cache."""
    name = "ckpt" if way in FLOORS else way
    top = Path(folder) / name
    buffer = bytearray(2**23)
    for file in [top] if top.is_file() else top.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass


def spread(found: list[float]) -> str:
    """Median, minimum and maximum."""
    return f"{statistics.median(found):.2f} ({min(found):.2f} - {max(found):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=0.5, help="size of the state")
    parser.add_argument("--leaf-mib", type=float, default=32)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--directory", default=None, help="where the files are; default: temporary")
    parser.add_argument("--only", default=",".join((*LIBRARIES, *FLOORS)))
    arguments = parser.parse_args()
    ways = arguments.only.split(",")
    side = int((arguments.leaf_mib * 2**20 / 4) ** 0.5)
    leaves = max(1, round(arguments.gib * 1024 / arguments.leaf_mib))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        for way in {"ckpt", *ways} - set(FLOORS):
            child(SAVE, folder, leaves, side, way)
        for state in ("warm", "cold"):
            how = state
            secs: dict[str, list[list[float]]] = {way: [] for way in ways}
            for _ in range(arguments.repeats):
                for way in ways:
                    if state == "cold":
                        how = f"cold, by {forget(folder)}"
                    else:
                        remember(folder, way)
                    code = DISK if way in FLOORS else LOAD
                    told = child(code, time.time(), folder, way, leaves, side)
                    secs[way].append(json.loads(told.splitlines()[-1]))
            print_table(f"{leaves} x {arguments.leaf_mib:g} MiB, page cache {how}", secs)


def print_table(title: str, secs: dict[str, list[list[float]]]) -> None:
    """One row a way: each phase, their sum, and the load beside the higher floor."""
    floor = max(
        (statistics.median(row[1] for row in secs[way]) for way in FLOORS if way in secs), default=0
    )
    print(f"\n{title}\n")
    print("| | import | load | first step | all | load / floor |")
    print("|---|---:|---:|---:|---:|---:|")
    for way, rows in secs.items():
        phases = [spread([row[number] for row in rows]) for number in range(len(PHASES))]
        ratio = statistics.median(row[1] for row in rows) / floor if floor else 0
        total = spread([sum(row) for row in rows])
        print(f"| {way} | {' | '.join(phases)} | {total} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
