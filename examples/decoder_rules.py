"""Rules that bring the weights of Llama-like and Gemma-like decoders, as hubs have them, into scanned layers.

    params = ckpt.load("folder", target, rules=LLAMA)

The target has one array for each kind of weight of all layers, ``[layer, ...]``, as ``jax.lax.scan`` takes them;
projections take a row vector from the left, and those of attention have a dimension of heads: ``q`` is ``[layer, width,
heads, size]``, ``kv`` is ``[layer, 2, width, kv_heads, size]``, ``out`` is ``[layer, heads, size, width]``; ``gate_up`` is
``[layer, width, 2 * hidden]``. Sizes and shardings are those of the target.

`llama_weights.py` loads a Llama into such a target.
"""

from __future__ import annotations

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
