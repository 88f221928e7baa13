"""Rules that bring the weights of Llama-like and Gemma-like decoders, as hubs have them, into scanned layers.

    params = ckpt.load("folder", target, rules=LLAMA)

The target has one array for each kind of weight of all layers, ``[layer, ...]``, as ``jax.lax.scan`` takes them;
projections take a row vector from the left, and those of attention have a dimension of heads: ``q`` is ``[layer, width,
heads, size]``, ``kv`` is ``[layer, 2, width, kv_heads, size]``, ``out`` is ``[layer, heads, size, width]``; ``gate_up`` is
``[layer, width, 2 * hidden]``. Sizes and shardings are those of the target.

Run it to see it: it makes a small Llama of zeros, and loads it into such a target.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import ckpt_core as ckpt
from ckpt_core import Rule

_LAYER = "model.layers.{n}"
_N = ("n",)

_ATTENTION_AND_MLP = [
    Rule(
        f"{_LAYER}.self_attn.q_proj.weight",
        "layers/attention/q",
        reshape=((0, 1), 2),  # [heads * size, width]
        transpose=(2, 0, 1),
        stack=_N,
    ),
    Rule(
        (f"{_LAYER}.self_attn.k_proj.weight", f"{_LAYER}.self_attn.v_proj.weight"),
        "layers/attention/kv",
        reshape=((0, 1, 2), 3),  # [2 * kv_heads * size, width], both of them one below the other
        transpose=(0, 3, 1, 2),
        stack=_N,
    ),
    Rule(
        f"{_LAYER}.self_attn.o_proj.weight",
        "layers/attention/out",
        reshape=(0, (1, 2)),  # [width, heads * size]
        transpose=(1, 2, 0),
        stack=_N,
    ),
    Rule(
        (f"{_LAYER}.mlp.gate_proj.weight", f"{_LAYER}.mlp.up_proj.weight"),
        "layers/mlp/gate_up",
        transpose=(1, 0),
        stack=_N,
    ),
    Rule(f"{_LAYER}.mlp.down_proj.weight", "layers/mlp/down", transpose=(1, 0), stack=_N),
    Rule(f"{_LAYER}.input_layernorm.weight", "layers/norm/before_attention", stack=_N),
    Rule("model.embed_tokens.weight", "embed"),
    Rule("model.norm.weight", "norm"),
]

LLAMA = [
    *_ATTENTION_AND_MLP,
    Rule(f"{_LAYER}.post_attention_layernorm.weight", "layers/norm/before_mlp", stack=_N),
    Rule("lm_head.weight", "head", transpose=(1, 0)),
]

GEMMA = [  # logits come from the embedding; the scale of a norm is 1 + weight, which the model adds
    *_ATTENTION_AND_MLP,
    Rule(f"{_LAYER}.post_attention_layernorm.weight", "layers/norm/after_attention", stack=_N),
    Rule(f"{_LAYER}.pre_feedforward_layernorm.weight", "layers/norm/before_mlp", stack=_N),
    Rule(f"{_LAYER}.post_feedforward_layernorm.weight", "layers/norm/after_mlp", stack=_N),
]


def main() -> None:
    from safetensors.numpy import save_file

    width, heads, kv_heads, size, hidden, layers, vocabulary = 64, 4, 2, 16, 128, 3, 256
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * size, width),
        "self_attn.k_proj": (kv_heads * size, width),
        "self_attn.v_proj": (kv_heads * size, width),
        "self_attn.o_proj": (width, heads * size),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    tensors = {
        f"model.layers.{n}.{name}.weight": np.zeros(shape, np.float32)
        for n in range(layers)
        for name, shape in shapes.items()
    }
    tensors["model.embed_tokens.weight"] = np.zeros((vocabulary, width), np.float32)
    tensors["lm_head.weight"] = np.zeros((vocabulary, width), np.float32)
    tensors["model.norm.weight"] = np.zeros(width, np.float32)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)  # give it a sharding here

    target = {
        "embed": leaf(vocabulary, width),
        "head": leaf(width, vocabulary),
        "norm": leaf(width),
        "layers": {
            "attention": {
                "q": leaf(layers, width, heads, size),
                "kv": leaf(layers, 2, width, kv_heads, size),
                "out": leaf(layers, heads, size, width),
            },
            "mlp": {
                "gate_up": leaf(layers, width, 2 * hidden),
                "down": leaf(layers, hidden, width),
            },
            "norm": {
                "before_attention": leaf(layers, width),
                "before_mlp": leaf(layers, width),
            },
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors")
        params = ckpt.load(folder, target, rules=LLAMA)
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        print(jax.tree_util.keystr(path, simple=True, separator="/"), array.shape)


if __name__ == "__main__":
    main()
