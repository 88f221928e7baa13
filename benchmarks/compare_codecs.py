"""Measures size and speed of compression by kind of data: python benchmarks/compare_codecs.py

A small transformer is trained on the sources of Python's standard library (byte by byte, AdamW), for its state is what
checkpoints hold: weights and both moments, as float32 and as bfloat16. Tokens and masks stand beside them. Every kind is
saved and loaded with every codec, in turn, for a few rounds; the table shows the size as a fraction of the uncompressed
checkpoint, and medians of saving and loading in GB/s of uncompressed data. Saves are durable; loads are verified and read
from the page cache.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from shared import header, in_turn, middle, options, row, timed  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ckpt_core as ckpt
from ckpt_core.bench._settle import inventory

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


def measure(path: Path, value: Any, codec: str | None) -> tuple[int, float, float]:
    """Stored bytes, and seconds of a save and of a load."""
    saving = {"options": ckpt.Options(compression=codec)}
    save_secs, _ = timed(lambda: ckpt.save(path, {"x": value}, **saving))
    load_secs, _ = timed(lambda: ckpt.load(path, as_numpy=True))
    size, _ = inventory(path)
    shutil.rmtree(path)
    return size, save_secs, load_secs


def main() -> None:
    given = options(
        __doc__,
        steps=(300, "of training before measuring"),
        width=(512, "of the model, a multiple of 8"),
        rounds=5,
    )
    header("data", "codec", "size", "save GB/s", "load GB/s", words=2)
    with tempfile.TemporaryDirectory(dir=given.directory or ".") as directory:
        for name, value in kinds(given.steps, given.width).items():
            total = sum(leaf.nbytes for leaf in jax.tree.leaves(value))
            work = functools.partial(measure, Path(directory) / "x", value)
            found = in_turn(CODECS, given.rounds, work, warm_ups=1)
            for codec, rounds in found.items():
                size, *secs = map(middle, zip(*rounds, strict=True))
                rates = (f"{total / one / 1e9:.2f}" for one in secs)
                row(name, codec or "none", f"{size / found[None][0][0]:.3f}", *rates)


if __name__ == "__main__":
    main()
