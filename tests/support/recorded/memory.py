"""How many MiB saves, loads, pieces and imports take at most, beyond what the program holds before."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support import forked
from tests.support.children import with_devices
from tests.support.paths import ROOT

STATES = {
    "16 x 32 MiB": "{f'w{n}': np.full((2048, 4096), n, 'f4') for n in range(16)}",
    "16 x 32 MiB in F order": "{f'w{n}': np.full((2048, 4096), n, 'f4', order='F') for n in range(16)}",
    "1 x 512 MiB": "{'w': np.full((1 << 15, 4096), 3, 'f4')}",
    "5000 x 1 KiB": "{f'w{n:04}': np.full(256, n, 'f4') for n in range(5000)}",
}
CALLS = {  # what comes before, and what is measured
    "save": ("state = {state}", "ckpt.save(path, state, options=quick)"),
    "save with zstd": ("state = {state}", "ckpt.save(path + 'z', state, options=packed)"),
    "load": ("", "jax.block_until_ready(ckpt.load(path))"),
    "load as numpy": ("", "ckpt.load(path, as_numpy=True)"),
    "load into the state": ("state = {state}", "ckpt.load(path, state)"),
    "load with zstd": ("", "jax.block_until_ready(ckpt.load(path + 'z'))"),
    "export": ("", "convert.export_safetensors(path, path + '.safetensors')"),
    "import": ("", "convert.import_weights(path + '.safetensors', path + 'i', options=quick)"),
}
PIECES = """
with ckpt.writer(path, options=quick) as writer:
    for n in range(64):
        writer.add("state", {f"w{n}": np.full(1 << 22, n, "f4")})
"""
CHILD = """
import sys
import jax, numpy as np
import jax.numpy as jnp
import ckpt_core as ckpt
from ckpt_core import convert

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))

warm, path, before, call = sys.argv[1:]
quick = ckpt.Options(durable=False)
packed = ckpt.Options(durable=False, compression="zstd")
ckpt.save(warm, {"a": jnp.ones(3), "b": np.ones(100_000)}, overwrite=True)  # threads, caches and imports
jax.block_until_ready(ckpt.load(warm))
exec(before)
held = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is counted from here
exec(call)
print((status("VmHWM") - held) // 1024)
"""
STEP_MIB = 16


def peaks() -> Iterator[str]:
    """The peak of each call on each state rounded up to 16 MiB; what is recorded stands where it is little more than that off."""
    file = ROOT / "tests" / "recorded" / "memory.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    recorded = {name: int(mib) for name, _, mib in (line.rpartition(": ") for line in lines)}
    fast = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=fast) as folder:

        def peak(title: str, before: str, call: str) -> str:
            arguments = f"{folder}/warm", f"{folder}/state", before, call
            done = forked.run(CHILD, *arguments, environment=with_devices(1))
            assert done.returncode == 0, done.stderr
            mib = int(done.stdout)
            rounded = (mib // STEP_MIB + 1) * STEP_MIB
            held = recorded.get(title, rounded)
            return f"{title}: {held if abs(held - mib) <= STEP_MIB + held // 16 else rounded}"

        for name, state in STATES.items():
            for call, (before, code) in CALLS.items():
                yield peak(f"{name}, {call}", before.format(state=state), code)
            for path in Path(folder).iterdir():
                path.unlink() if path.is_file() else shutil.rmtree(path)
        yield peak("64 pieces of 16 MiB", "", PIECES)
