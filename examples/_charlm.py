"""A small character transformer, its optimizer and its data pipeline, for `train_nnx.py`.

This module contains nothing about checkpoints.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from flax import nnx

VOCABULARY = 128  # ASCII
CONTEXT = 64
BATCH = 8

# Python's own sources: text that every machine has.
SOURCES = "argparse ast dataclasses difflib functools heapq inspect pathlib statistics textwrap"


class Block(nnx.Module):
    """Attention and a two-layer network, each behind a norm and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, dropout_rate=dropout, deterministic=False, decode=False, rngs=rngs
        )
        self.network_norm = nnx.LayerNorm(width, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        hidden = nnx.gelu(self.expand(self.network_norm(x)))
        return x + self.dropout(self.contract(hidden))


class CharTransformer(nnx.Module):
    """Predicts the next character of every position."""

    def __init__(
        self,
        width: int = 224,
        depth: int = 3,
        heads: int = 4,
        dropout: float = 0.1,
        *,
        rngs: nnx.Rngs,
    ):
        self.characters = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, dropout, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.characters(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def make_optimizer(model: nnx.Module, total_steps: int) -> nnx.Optimizer:
    """AdamW with warm-up and cosine decay; gradients clipped, only matrices decayed."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=1e-3, warmup_steps=total_steps // 10, decay_steps=total_steps
    )
    transform = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, weight_decay=0.1, mask=_is_matrix),
    )
    return nnx.Optimizer(model, transform, wrt=nnx.Param)


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def inputs_and_targets(windows: np.ndarray) -> dict[str, np.ndarray]:
    """The same characters, shifted by one."""
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def make_data(seed: int = 0) -> grain.DatasetIterator[dict[str, np.ndarray]]:
    """Endless shuffled batches, prepared by a worker process."""
    # Grain's workers read absl flags, which are parsed for them only under `absl.app.run`.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["train"])
    dataset = (
        grain.MapDataset.source(_windows())
        .seed(seed)
        .shuffle()
        .repeat()
        .batch(BATCH)
        .map(inputs_and_targets)
        .to_iter_dataset()
        .mp_prefetch(grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=4))
    )
    return iter(dataset)


def _windows() -> Any:
    """Windows of the text that overlap by half."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join((folder / f"{name}.py").read_bytes() for name in SOURCES.split())
    characters = np.frombuffer(text, np.uint8)
    numbers = np.where(characters < VOCABULARY, characters, ord("?")).astype(np.int32)
    return np.lib.stride_tricks.sliding_window_view(numbers, CONTEXT + 1)[:: CONTEXT // 2]
