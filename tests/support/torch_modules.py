"""Modules of plain PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nets = pytest.importorskip("tests.support.torchax_nets")

import ckpt_core as ckpt  # noqa: E402
from tests.support.torchax_nets import net  # noqa: E402

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


@pytest.fixture(name="saved")
def make_saved(tmp_path: Path) -> Any:
    """A tied Net on JAX arrays, in a checkpoint, and the module."""
    with nets.torchax_enabled():
        model = net(0, tied=True)
        model.norm.num_batches_tracked.add_(5)
        ckpt.save(tmp_path / "saved", model=model, step=7)
    return tmp_path / "saved", model
