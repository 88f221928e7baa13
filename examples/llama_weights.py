"""Somebody's weights, in and out: a Llama of safetensors, trained sharded in JAX, and given back to PyTorch.

    python examples/llama_weights.py --gib 2

1. Writes a decoder with the names and shapes of Llama as safetensors, random, of about the size that is asked for.
2. Loads it into an NNX model that is sharded over 8 CPU devices, with hardly more memory than the model has. Each device
   reads its own parts, and the rules are applied on the way.
3. Exports it to safetensors, through the same rules backwards: every bit as in the file.
4. Trains a few steps, exports again, loads that in PyTorch, and compares the logits.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from decoder_rules import LLAMA
from flax import nnx
from safetensors.numpy import save_file

import ckpt_core as ckpt
import ckpt_flax_nnx

LAYERS, HEADS, KV_HEADS, SIZE, VOCABULARY = 4, 16, 4, 32, 4096
WIDTH = HEADS * SIZE
SHAPES = {
    "self_attn.q_proj": (HEADS * SIZE, WIDTH),
    "self_attn.k_proj": (KV_HEADS * SIZE, WIDTH),
    "self_attn.v_proj": (KV_HEADS * SIZE, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * SIZE),
    "input_layernorm": (WIDTH,),
    "post_attention_layernorm": (WIDTH,),
}


def hidden_for(total_bytes: int) -> int:
    """The width of the MLPs that gives a model of about that size."""
    rest = 2 * VOCABULARY * WIDTH + LAYERS * 3 * WIDTH * WIDTH
    return max(64, (total_bytes // 4 - rest) // (LAYERS * 3 * WIDTH) // 64 * 64)


def write_llama(folder: Path, hidden: int) -> int:
    """Writes the model, one file for each layer, as hubs have large ones; returns its size in bytes."""
    random = np.random.default_rng(0)
    mlp = {"gate_proj": (hidden, WIDTH), "up_proj": (hidden, WIDTH), "down_proj": (WIDTH, hidden)}
    shapes = SHAPES | {f"mlp.{name}": shape for name, shape in mlp.items()}
    files = [
        {f"model.layers.{n}.{name}.weight": shape for name, shape in shapes.items()}
        for n in range(LAYERS)
    ]
    files.append({"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)})
    files.append({"lm_head.weight": (VOCABULARY, WIDTH)})
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {
            name: random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
            + np.float32(len(shape) == 1)
            for name, shape in names.items()
        }
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        total += sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


class Group(nnx.Module):
    """Parameters by name; groups may hold groups."""

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            setattr(self, name, part)


def parameter(*shape: int, spread: tuple[str | None, ...] = ()) -> nnx.Param[jax.Array]:
    """A parameter, with the axes of the mesh over which its dimensions are spread."""
    return nnx.Param(jnp.zeros(shape), out_sharding=spread)


class Llama(nnx.Module):
    """The decoder, with one array for each kind of weight of all layers."""

    def __init__(self, hidden: int) -> None:
        self.embed = parameter(VOCABULARY, WIDTH, spread=("model", None))
        self.head = parameter(WIDTH, VOCABULARY, spread=(None, "model"))
        self.norm = parameter(WIDTH)
        heads = (None, None, "model", None)
        self.layers = Group(
            attention=Group(
                q=parameter(LAYERS, WIDTH, HEADS, SIZE, spread=heads),
                kv=parameter(LAYERS, 2, WIDTH, KV_HEADS, SIZE, spread=(None, *heads)),
                out=parameter(LAYERS, HEADS, SIZE, WIDTH, spread=(None, "model", None, None)),
            ),
            mlp=Group(
                gate_up=parameter(LAYERS, WIDTH, 2 * hidden, spread=(None, "data", "model")),
                down=parameter(LAYERS, hidden, WIDTH, spread=(None, "model", "data")),
            ),
            norm=Group(
                before_attention=parameter(LAYERS, WIDTH), before_mlp=parameter(LAYERS, WIDTH)
            ),
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        layers = nnx.to_pure_dict(nnx.state(self.layers))
        x, _ = jax.lax.scan(layer, self.embed[...][tokens], layers)
        return normed(x, self.norm[...]) @ self.head[...]


def normed(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def angles(length: int) -> np.ndarray:
    return np.arange(length)[:, None] / 10_000 ** (np.arange(SIZE // 2) / (SIZE // 2))


def rotated(x: jax.Array) -> jax.Array:
    cos, sin = jnp.cos(angles(len(x)))[:, None], jnp.sin(angles(len(x)))[:, None]
    one, two = jnp.split(x, 2, -1)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def layer(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
    y = normed(x, one["norm"]["before_attention"])
    q = rotated(jnp.einsum("tw,whd->thd", y, one["attention"]["q"]))
    k, v = jnp.einsum("tw,kwhd->kthd", y, one["attention"]["kv"])
    k, v = (jnp.repeat(part, HEADS // KV_HEADS, 1) for part in (rotated(k), v))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
    scores = jnp.where(np.tri(len(x), dtype=bool), scores, -1e9)
    mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("qhd,hdw->qw", mixed, one["attention"]["out"])
    y = normed(x, one["norm"]["before_mlp"])
    gate, up = jnp.split(y @ one["mlp"]["gate_up"], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ one["mlp"]["down"], None


def memory_bytes(which: str) -> int:
    """Memory of this process: ``VmRSS`` now, ``VmHWM`` at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(which)).split()[1]) * 1024


def exported(model: Llama, folder: Path) -> Path:
    """The folder with the weights of a model as safetensors, by the rules backwards."""
    ckpt.save(folder / "checkpoint", model=model)
    ckpt.convert.export_safetensors(
        folder / "checkpoint", folder / "weights", item="model", rules=LLAMA
    )
    return folder / "weights"


def are_same(one: Path, other: Path) -> bool:
    """Whether two folders have the same tensors, bit for bit."""
    here, there = (ckpt.load(folder, as_numpy=True) for folder in (one, other))
    return here.keys() == there.keys() and all(
        np.array_equal(here[name], there[name]) for name in here
    )


@nnx.jit
def train_step(model: Llama, tokens: jax.Array) -> jax.Array:
    def loss(model: Llama) -> jax.Array:
        logits = jax.nn.log_softmax(model(tokens[:-1]))
        return -jnp.take_along_axis(logits, tokens[1:, None], 1).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda one, step: one - 1e-2 * step, state, gradients))
    return value


def torch_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """The logits by PyTorch, of the weights in a folder, under the names of Llama."""
    import torch
    from torch.nn import functional

    weights: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as opened:
            weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118

    def norm(x: Any, name: str) -> Any:
        return functional.rms_norm(x, (WIDTH,), weights[f"{name}.weight"], 1e-6)

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, weights[f"{name}.weight"])

    turns = torch.tensor(angles(len(tokens)), dtype=torch.float32)[:, None]

    def rotated(x: Any) -> Any:
        one, two = x.chunk(2, -1)
        cos, sin = turns.cos(), turns.sin()
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    x = functional.embedding(torch.tensor(tokens), weights["model.embed_tokens.weight"])
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        y = norm(x, f"{at}.input_layernorm")
        q = rotated(linear(y, f"{at}.self_attn.q_proj").view(-1, HEADS, SIZE))
        k = rotated(linear(y, f"{at}.self_attn.k_proj").view(-1, KV_HEADS, SIZE))
        v = linear(y, f"{at}.self_attn.v_proj").view(-1, KV_HEADS, SIZE)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
        mixed = functional.scaled_dot_product_attention(
            *(one.transpose(0, 1) for one in (q, k, v)), is_causal=True
        )
        x = x + linear(mixed.transpose(0, 1).reshape(-1, WIDTH), f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        gate = functional.silu(linear(y, f"{at}.mlp.gate_proj"))
        x = x + linear(gate * linear(y, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head").numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--gib", type=float, default=1 / 16, help="size of the model")
    parser.add_argument("--directory", type=Path, help="where to work; else a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        run(Path(name), hidden_for(int(arguments.gib * 2**30)))


def run(folder: Path, hidden: int) -> None:
    hub = folder / "hub"
    hub.mkdir()
    total = write_llama(hub, hidden)
    print(f"a Llama of {total / 2**20:.0f} MiB in {len(list(hub.glob('*.safetensors')))} files")

    mesh = jax.make_mesh((2, 4), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    model = ckpt_flax_nnx.abstract(lambda: Llama(hidden), mesh)
    small = folder / "small.safetensors"
    save_file({"w": np.zeros(2, np.float32)}, small)
    ckpt.load(small)  # what a process needs once is not memory of the model
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    model = ckpt.load(hub, model, rules=LLAMA)
    ratio = (memory_bytes("VmHWM") - before) / total
    print(f"loaded onto 8 devices: peak memory is {ratio:.3f} of the model")
    print(f"bit for bit as in the file: {are_same(hub, exported(model, folder / 'loaded'))}")

    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 33)
    losses = [float(train_step(model, jnp.asarray(tokens))) for _ in range(3)]
    print(f"trained: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    weights = exported(model, folder / "trained")

    with jax.default_matmul_precision("highest"):
        ours = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens)))
    theirs = torch_logits(weights, tokens)
    print(
        f"logits of PyTorch differ by {np.abs(ours - theirs).max():.1e} of {np.abs(ours).max():.1f}"
    )


if __name__ == "__main__":
    main()
