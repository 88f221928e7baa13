"""What the tests of torchax share beside the nets."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")
nets = pytest.importorskip("tests.support.torchax_nets")
from torch import nn  # noqa: E402

from tests.support.torchax_nets import torch_view  # noqa: E402

torchax = nets.torchax


@pytest.fixture(name="env", autouse=True)
def make_env():
    """torchax, on for the test and off after it."""
    with nets.torchax_enabled() as environment:
        yield environment


def tensor(array: Any) -> Any:
    return torch_view(jnp.asarray(array))


class Holder(nn.Module):
    """One parameter or buffer."""

    def __init__(self, value: Any, buffer: bool = False) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("x", value)
        else:
            self.x = nn.Parameter(value, requires_grad=False)
