"""Measures size and speed of compression by kind of data: python benchmarks/compression.py

Every kind is saved and loaded with every codec, in turn, for a few rounds; the table shows the size
as a fraction of the uncompressed checkpoint, and the medians of saving and loading in GB/s of
uncompressed data. Saves are durable; loads are verified and read from the page cache. Weights are
drawn from a normal distribution, which compresses as badly as trained ones; moments decay over many
magnitudes; tokens are integers below 50,000; a tenth of each mask is ones.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the working tree, uninstalled

import ml_dtypes
import numpy as np

import ckpt_core as ckpt

MIB = 1024 * 1024
CODECS = (None, "zstd", "zstd:3", "blosc", "blosc:zstd:3")


def kinds(size_bytes: int) -> dict[str, np.ndarray]:
    """One array of each kind of data, all of about ``size_bytes``."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(size_bytes // 4, dtype=np.float32)
    return {
        "weights float32": normal * 0.02,
        "weights bfloat16": np.tile(normal * 0.02, 2).astype(ml_dtypes.bfloat16),
        "moments float32": (normal * 1e-3) ** 2,
        "tokens int32": rng.integers(0, 50_000, size_bytes // 4, dtype=np.int32),
        "masks bool": rng.random(size_bytes, dtype=np.float32) < 0.1,
    }


def stored_bytes(path: Path) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def measure(path: Path, value: np.ndarray, codec: str | None) -> tuple[int, float, float]:
    """Stored bytes, and seconds of a save and of a load."""
    options = ckpt.Options(compression=codec)
    begin = time.perf_counter()
    ckpt.save(path, {"x": value}, options=options)
    saved = time.perf_counter()
    ckpt.load(path, as_numpy=True)
    loaded = time.perf_counter()
    size = stored_bytes(path)
    shutil.rmtree(path)
    return size, saved - begin, loaded - saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=128, help="size of each array")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="on a real disk; the current one by default")
    arguments = parser.parse_args()
    print("| data | codec | size | save GB/s | load GB/s |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=arguments.directory or ".") as directory:
        for name, value in kinds(arguments.mib * MIB).items():
            results: dict[str | None, list[tuple[int, float, float]]] = {c: [] for c in CODECS}
            for number in range(arguments.rounds + 1):
                for codec in CODECS:
                    found = measure(Path(directory) / "x", value, codec)
                    if number:  # the first round warms up
                        results[codec].append(found)
            plain = results[None][0][0]
            for codec, rounds in results.items():
                size, save_secs, load_secs = map(statistics.median, zip(*rounds, strict=True))
                print(
                    f"| {name} | {codec or 'none'} | {size / plain:.2f} "
                    f"| {value.nbytes / save_secs / 1e9:.2f} | {value.nbytes / load_secs / 1e9:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
