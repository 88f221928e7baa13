"""Rules for decoders: weights of a Gemma that PyTorch saved, sharded and stacked over its layers.

tests/house/test_examples.py runs the rules of a Llama, which are nearly the same, up to equal logits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt

torch: Any = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from examples.decoder_rules import GEMMA  # noqa: E402

VOCABULARY, WIDTH, HEADS, KV_HEADS, SIZE, HIDDEN, LAYERS = 48, 16, 4, 2, 8, 24, 3
LINEAR = {
    "self_attn.q_proj": (HEADS * SIZE, WIDTH),
    "self_attn.k_proj": (KV_HEADS * SIZE, WIDTH),
    "self_attn.v_proj": (KV_HEADS * SIZE, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * SIZE),
    "mlp.gate_proj": (HIDDEN, WIDTH),
    "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
}
NORMS = {
    "before_attention": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}


def test_each_weight_of_a_gemma_comes_to_its_place(tmp_path, mesh):
    shapes = LINEAR | dict.fromkeys(NORMS.values(), (WIDTH,))
    state = {
        f"model.layers.{layer}.{name}.weight": torch.randn(shape)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    state["model.embed_tokens.weight"] = torch.randn(VOCABULARY, WIDTH)
    state["model.norm.weight"] = torch.randn(WIDTH)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})

    def stacked(name: str) -> Any:
        return np.stack([state[f"model.layers.{n}.{name}.weight"].numpy() for n in range(LAYERS)])

    def projected(name: str, heads: int) -> Any:
        return (
            stacked(f"self_attn.{name}").reshape(LAYERS, heads, SIZE, WIDTH).transpose(0, 3, 1, 2)
        )

    gate, up = (stacked(f"mlp.{name}").mT for name in ("gate_proj", "up_proj"))
    q, keys, values = (
        projected(name, heads)
        for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS))
    )
    out = stacked("self_attn.o_proj").reshape(LAYERS, WIDTH, HEADS, SIZE).transpose(0, 2, 3, 1)
    expected = {
        "embed": state["model.embed_tokens.weight"].numpy(),
        "norm": state["model.norm.weight"].numpy(),
        "layers": {
            "attention": {"q": q, "kv": np.stack([keys, values], 1), "out": out},
            "mlp": {"gate_up": np.concatenate([gate, up], -1), "down": stacked("mlp.down_proj").mT},
            "norm": {ours: stacked(theirs) for ours, theirs in NORMS.items()},
        },
    }

    def leaf(value: Any) -> Any:
        spec = (
            PartitionSpec(*[None] * (value.ndim - 1), "model")
            if value.ndim > 2
            else PartitionSpec()
        )
        return jax.ShapeDtypeStruct(value.shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = ckpt.load(tmp_path, jax.tree.map(leaf, expected), rules=GEMMA)
    assert params["layers"]["attention"]["q"].sharding.spec[-1] == "model"
    jax.tree.map(np.testing.assert_array_equal, params, expected)
