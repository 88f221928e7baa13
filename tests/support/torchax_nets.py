"""What the tests of torch and torchax share: modules, tensors, fixtures; importing it needs both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import ckpt_core as ckpt
from ckpt_torchax import shim

shim.install()
import torchax  # noqa: E402
import torchax.train  # noqa: E402
from torchax.interop import (  # noqa: E402
    call_jax as call_jax,
    jax_jit as jax_jit,
    torch_view as torch_view,
)


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


def tensor(array: Any) -> Any:
    return torch_view(jnp.asarray(array))


class Holder(nn.Module):
    """One parameter or buffer."""

    def __init__(self, value: Any, buffer: bool = True) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("x", value)
        else:
            self.x = nn.Parameter(value, requires_grad=False)


@pytest.fixture(name="env", autouse=True)
def make_env() -> Iterator[Any]:
    """torchax, on for each test of a module that imports this, and off after it."""
    with torchax_enabled() as environment:
        yield environment


@pytest.fixture(name="saved")
def make_saved(tmp_path: Path) -> Any:
    """A tied Net on JAX arrays, in a checkpoint, and the module."""
    with torchax_enabled():
        model = net(0, tied=True)
        model.norm.num_batches_tracked.add_(5)
        ckpt.save(tmp_path / "saved", model=model, step=7)
    return tmp_path / "saved", model


DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def bits(dtype: str, count: int = 64) -> Any:
    """A tensor of random bits; of bools, for bool."""
    width = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    numbers = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, count * width)
    return torch.from_numpy(numbers.astype(np.uint8)).view(getattr(torch, dtype))


def bytes_of(value: Any) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
