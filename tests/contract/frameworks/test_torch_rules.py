"""Rules for decoders: weights of a Gemma that PyTorch saved give the same logits in jax, scanned over layers.

examples/llama_weights.py does the same with a Llama, which has less: no norms after, and an embedding apart from the head.
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


def rotated(x: Any, xp: Any) -> Any:
    """Rotary positions on [tokens, heads, size], the halves of a head in pairs."""
    angle = np.arange(x.shape[0])[:, None] / 10_000 ** (np.arange(SIZE // 2) / (SIZE // 2))
    cos, sin = (
        xp.asarray(one[:, None].astype(np.float32)) for one in (np.cos(angle), np.sin(angle))
    )
    one, two = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    parts = [one * cos - two * sin, two * cos + one * sin]
    return torch.cat(parts, -1) if xp is torch else xp.concatenate(parts, -1)


class Decoder(torch.nn.Module):
    """A decoder with the parameter names of Gemma."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn

        def linear(inputs: int, outputs: int) -> Any:
            return nn.Linear(inputs, outputs, bias=False)

        def norm() -> Any:
            made = nn.Module()
            made.weight = nn.Parameter(torch.randn(WIDTH) / 4)
            return made

        def layer() -> Any:
            made, made.self_attn, made.mlp = nn.Module(), nn.Module(), nn.Module()
            made.self_attn.q_proj = linear(WIDTH, HEADS * SIZE)
            made.self_attn.k_proj = linear(WIDTH, KV_HEADS * SIZE)
            made.self_attn.v_proj = linear(WIDTH, KV_HEADS * SIZE)
            made.self_attn.o_proj = linear(HEADS * SIZE, WIDTH)
            made.mlp.gate_proj, made.mlp.up_proj = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN)
            made.mlp.down_proj = linear(HIDDEN, WIDTH)
            made.input_layernorm, made.post_attention_layernorm = norm(), norm()
            made.pre_feedforward_layernorm, made.post_feedforward_layernorm = norm(), norm()
            return made

        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.model.layers = nn.ModuleList([layer() for _ in range(LAYERS)])
        self.model.norm = norm()

    def normed(self, x: Any, norm: Any) -> Any:
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-6) * (norm.weight + 1)

    def attention(self, x: Any, one: Any) -> Any:
        q = rotated(one.q_proj(x).view(len(x), HEADS, SIZE), torch)
        k = rotated(one.k_proj(x).view(len(x), KV_HEADS, SIZE), torch)
        v = one.v_proj(x).view(len(x), KV_HEADS, SIZE)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
        scores = scores + torch.full((len(x), len(x)), -1e9).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return one.o_proj(mixed.reshape(len(x), HEADS * SIZE))

    def forward(self, tokens: Any) -> Any:
        x = self.model.embed_tokens(tokens) * WIDTH**0.5
        for one in self.model.layers:
            mixed = self.attention(self.normed(x, one.input_layernorm), one.self_attn)
            x = x + self.normed(mixed, one.post_attention_layernorm)
            y = self.normed(x, one.pre_feedforward_layernorm)
            gate = one.mlp.gate_proj(y)
            gate = torch.nn.functional.gelu(gate, approximate="tanh")
            y = one.mlp.down_proj(gate * one.mlp.up_proj(y))
            x = x + self.normed(y, one.post_feedforward_layernorm)
        return self.normed(x, self.model.norm) @ self.model.embed_tokens.weight.T


def logits(params: Any, tokens: Any) -> Any:
    """The same decoder in jax: layers are scanned, projections have a dimension of heads."""

    def normed(x: Any, weight: Any) -> Any:
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (weight + 1)

    def layer(x: Any, one: Any) -> Any:
        y = normed(x, one["norm"]["before_attention"])
        q = rotated(jnp.einsum("te,ehd->thd", y, one["attention"]["q"]), jnp)
        k, v = jnp.einsum("te,zehd->zthd", y, one["attention"]["kv"])
        k, v = (jnp.repeat(part, HEADS // KV_HEADS, 1) for part in (rotated(k, jnp), v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
        scores = jnp.where(jnp.tri(len(x)), scores, -1e9)
        mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)
        mixed = jnp.einsum("thd,hde->te", mixed, one["attention"]["out"])
        x = x + normed(mixed, one["norm"]["after_attention"])
        y = normed(x, one["norm"]["before_mlp"])
        gate, up = jnp.split(y @ one["mlp"]["gate_up"], 2, -1)
        y = (jax.nn.gelu(gate) * up) @ one["mlp"]["down"]
        return x + normed(y, one["norm"]["after_mlp"]), None

    x = params["embed"][tokens] * WIDTH**0.5
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return normed(x, params["norm"]) @ params["embed"].T


def target(mesh: Any) -> Any:
    def leaf(*shape: int, spec: tuple[Any, ...] = ()) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    norms = ("before_attention", "before_mlp", "after_attention", "after_mlp")
    return {
        "embed": leaf(VOCABULARY, WIDTH, spec=("data",)),
        "norm": leaf(WIDTH),
        "layers": {
            "attention": {
                "q": leaf(LAYERS, WIDTH, HEADS, SIZE, spec=(None, "model", "data")),
                "kv": leaf(LAYERS, 2, WIDTH, KV_HEADS, SIZE, spec=(None, None, "data", "model")),
                "out": leaf(LAYERS, HEADS, SIZE, WIDTH, spec=(None, "model", None, "data")),
            },
            "mlp": {
                "gate_up": leaf(LAYERS, WIDTH, 2 * HIDDEN, spec=(None, "data", "model")),
                "down": leaf(LAYERS, HIDDEN, WIDTH, spec=(None, "model", "data")),
            },
            "norm": {name: leaf(LAYERS, WIDTH) for name in norms},
        },
    }


def test_equal_logits(tmp_path, mesh):
    torch.manual_seed(0)
    model = Decoder()
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).numpy()
    params = ckpt.load(tmp_path, target(mesh), rules=GEMMA)
    assert params["layers"]["attention"]["q"].sharding.spec == PartitionSpec(None, "model", "data")
    with jax.default_matmul_precision("highest"):
        found = np.asarray(logits(params, jnp.asarray(tokens)))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
