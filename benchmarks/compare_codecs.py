"""Measures size and speed of compression by kind of data: python benchmarks/compare_codecs.py

A small transformer is trained on the sources of Python's standard library (byte by byte, AdamW), for its state is what
checkpoints hold: weights and both moments, as float32 and as bfloat16. Tokens and masks stand beside them. Every kind is
saved and loaded with every codec, in turn, for a few rounds; the table shows the size as a fraction of the uncompressed
checkpoint, and medians of saving and loading in GB/s of uncompressed data. Saves are durable; loads are verified and read
from the page cache.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the working tree, uninstalled

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ckpt_core as ckpt

CODECS = (None, "zstd", "zstd:3", "blosc", "blosc:zstd:1", "blosc:zstd:3", "blosc:zstd:5")
LAYERS, HEADS, CONTEXT, BATCH = 6, 8, 64, 8


def corpus() -> np.ndarray:
    """Bytes of Python's standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def begin(width: int) -> dict[str, Any]:
    """Parameters before training."""
    keys = iter(jax.random.split(jax.random.key(0), 8 * LAYERS + 8))

    def drawn(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

    layer = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    layers = [{n: drawn(*s) for n, s in layer.items()} for _ in range(LAYERS)]
    for one in layers:
        one.update(scale1=jnp.ones(width), scale2=jnp.ones(width), bias=jnp.zeros(4 * width))
    return {"tokens": drawn(256, width), "places": drawn(CONTEXT, width), "layers": layers}


def loss(params: dict[str, Any], text: jax.Array) -> jax.Array:
    """Mean cross entropy of the next byte."""

    width = params["tokens"].shape[1]

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    x = params["tokens"][text[:, :-1]] + params["places"]
    for layer in params["layers"]:
        q, k, v = jnp.split(norm(x, layer["scale1"]) @ layer["qkv"], 3, -1)
        heads = (*x.shape[:2], HEADS, width // HEADS)
        mixed = jax.nn.dot_product_attention(
            q.reshape(heads), k.reshape(heads), v.reshape(heads), is_causal=True
        )
        x = x + mixed.reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(norm(x, layer["scale2"]) @ layer["up"] + layer["bias"]) @ layer["down"]
    logits = x @ params["tokens"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def trained(steps: int, width: int) -> tuple[dict[str, Any], Any]:
    """Parameters and Adam's state after some steps."""
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 30, max(steps, 31)))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, text: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, text)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    data, random = corpus(), np.random.default_rng(0)
    params = begin(width)
    state = optimizer.init(params)
    for number in range(steps):
        starts = random.integers(0, len(data) - CONTEXT - 1, BATCH)
        text = np.stack([data[s : s + CONTEXT + 1] for s in starts]).astype(np.int32)
        params, state, value = step(params, state, text)
        if number % 100 == 0 or number == steps - 1:
            print(f"step {number}: loss {float(value):.2f}", file=sys.stderr, flush=True)
    return params, state


def kinds(steps: int, width: int) -> dict[str, Any]:
    """A tree of each kind of data."""
    params, state = trained(steps, width)
    (adam,) = (one for one in state if isinstance(one, optax.ScaleByAdamState))
    random = np.random.default_rng(0)
    trees = {"weights": params, "first moment": adam.mu, "second moment": adam.nu}
    found: dict[str, Any] = {}
    for name, tree in trees.items():
        found[f"{name}, float32"] = jax.tree.map(np.asarray, tree)
        found[f"{name}, bfloat16"] = jax.tree.map(
            lambda x: np.asarray(x.astype(jnp.bfloat16)), tree
        )
    found["text of the corpus as int32"] = corpus()[: width * 2**14].astype(np.int32)
    found["masks with a tenth of ones, bool"] = random.random(width * 2**16, dtype=np.float32) < 0.1
    return found


def stored_bytes(path: Path) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def measure(path: Path, value: Any, codec: str | None) -> tuple[int, float, float]:
    """Stored bytes, and seconds of a save and of a load."""
    options = ckpt.Options(compression=codec)
    start = time.perf_counter()
    ckpt.save(path, {"x": value}, options=options)
    saved = time.perf_counter()
    ckpt.load(path, as_numpy=True)
    loaded = time.perf_counter()
    size = stored_bytes(path)
    shutil.rmtree(path)
    return size, saved - start, loaded - saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of training before measuring")
    parser.add_argument("--width", type=int, default=512, help="of the model, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="on a real disk; the current one by default")
    arguments = parser.parse_args()
    print("| data | codec | size | save GB/s | load GB/s |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=arguments.directory or ".") as directory:
        for name, value in kinds(arguments.steps, arguments.width).items():
            total = sum(leaf.nbytes for leaf in jax.tree.leaves(value))
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
                    f"| {name} | {codec or 'none'} | {size / plain:.3f} "
                    f"| {total / save_secs / 1e9:.2f} | {total / load_secs / 1e9:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
