"""Modules and steps that the tests of torchax share; importing it needs torch and torchax."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from ckpt_torchax import shim

shim.install()
import torchax  # noqa: E402
import torchax.train  # noqa: E402
from torchax.interop import call_jax, jax_jit, torch_view  # noqa: E402


@contextlib.contextmanager
def torchax_enabled() -> Iterator[Any]:
    """The environment, switched on globally in here, and as it was afterwards."""
    env = torchax.default_env()
    before = env.param.prng
    torchax.enable_globally()
    try:
        env.manual_seed(0)
        yield env
    finally:
        torchax.disable_globally()
        env.param.prng = before


class Net(nn.Module):
    """Embedding, batch norm, dropout, a head that may be tied, and a non-persistent buffer."""

    def __init__(self, tied: bool = False, p: float = 0.25) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(8, 11, bias=False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        if tied:
            self.tie()

    def tie(self) -> Net:
        self.head.weight = self.embed.weight
        return self

    def forward(self, x: Any) -> Any:
        return self.head(self.drop(self.norm(self.embed(x))))


def net(seed: int = 0, *, tied: bool = False) -> Any:
    """A Net on JAX arrays; `.to("jax")` unties, so it is tied again."""
    torch.manual_seed(seed)
    made = Net(tied).to("jax")
    return made.tie() if tied else made


def values(module: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of a state_dict as numpy."""
    return {
        name: np.array(value.jax() if hasattr(value, "jax") else value.numpy())
        for name, value in module.state_dict().items()
    }


def same(one: Any, other: Any) -> bool:
    """Whether two dictionaries of arrays are equal to the bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and one[name].tobytes() == other[name].tobytes()
        for name in one
    )


def batch(step: int) -> tuple[Any, Any]:
    numbers = np.random.default_rng(step).integers(0, 11, (2, 16)).astype(np.int32)
    tokens, labels = torch_view(jax.numpy.asarray(numbers))
    return tokens, labels


__all__ = [
    "Net",
    "batch",
    "call_jax",
    "jax_jit",
    "net",
    "same",
    "torch_view",
    "torchax",
    "torchax_enabled",
    "values",
]
