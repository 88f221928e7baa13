"""The suite of ``ckpt_core.testing``, passed by modules and optimizers, on JAX arrays and plain."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import pytest
import torch
from torch import nn

from ckpt_core.testing import InPlaceSuite
from tests.contract.conformance import CasesSuite, each_of, given
from tests.support.compiling import compiled_once  # noqa: F401 (fixture)
from tests.support.torchax_nets import batch, net, torch_view, torchax_enabled


def make_on_jax(seed: int) -> Any:
    """Embedding, batch norm, dropout and a tied head, on JAX arrays."""
    with torchax_enabled():
        return net(seed, tied=True)


def step_on_jax(module: Any) -> Any:
    """A step of SGD; dropout draws from a key that the module's own counter says."""
    names = dict(module.named_parameters())
    with torchax_enabled() as env:
        env.manual_seed(int(module.norm.num_batches_tracked.jax()))
        tokens, labels = batch(3)

        def loss_of(weights: Any) -> Any:
            logits = torch.func.functional_call(module, torch_view(weights), (tokens,))
            loss: Any = nn.functional.cross_entropy(logits, labels)
            return loss.jax()

        weights = {name: parameter.jax() for name, parameter in names.items()}
        gradients = jax.grad(loss_of)(weights)
        with torch.no_grad():
            loss = loss_of(weights)
            for name, parameter in names.items():
                parameter.sub_(0.1 * torch_view(gradients[name]))
        return loss


class Plain(nn.Module):
    """An LSTM, weight norm, batch norm, tied weights, bfloat16 and a buffer of 64-bit integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.embed.weight
        self.gain = nn.Parameter(torch.randn(8).bfloat16())
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Any) -> Any:
        x, _ = self.lstm(self.embed(tokens))
        return self.out(self.head(self.norm(x[:, -1])) * self.gain.float())


TOKENS = torch.arange(24).reshape(3, 8) % 16


def make_plain(seed: int) -> Any:
    torch.manual_seed(seed)
    return Plain()


def step_plain(module: Any) -> Any:
    loss = nn.functional.cross_entropy(module(TOKENS), TOKENS[:, 0])
    module.zero_grad()
    loss.backward()
    with torch.no_grad():
        module.steps += 1
        for parameter in module.parameters():
            parameter -= 0.1 * parameter.grad
    return loss.detach().numpy()


def make_optimizer(seed: int) -> Any:
    """AdamW over two groups, after a step: it has no state before."""
    one, other = nn.Parameter(torch.zeros(8, 3)), nn.Parameter(torch.zeros(8))
    groups: Any = [{"params": [one]}, {"params": [other], "lr": 0.5, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1 + seed, amsgrad=True)
    step_optimizer(optimizer)
    return optimizer


def step_optimizer(optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            steps = float(state.get("step", 0.0))
            parameter.grad = torch.full_like(parameter, steps + group["lr"])
    optimizer.step()


def make_generator(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


def step_generator(generator: Any) -> Any:
    return torch.rand(3, generator=generator).numpy()


CASES = {
    "on jax": (make_on_jax, step_on_jax),
    "plain": (make_plain, step_plain),
    "generator": (make_generator, step_generator),
}


class TestTorch(CasesSuite):
    case = each_of(CASES)


class TestOptimizer(InPlaceSuite):
    make = given(make_optimizer)
    step = given(step_optimizer)

    @pytest.fixture
    def misfits(self) -> Mapping[str, Callable[[], Any]]:
        def over(*shapes: tuple[int, ...], cls: Any = torch.optim.AdamW) -> Any:
            groups: Any = [{"params": [nn.Parameter(torch.zeros(shape))]} for shape in shapes]
            return cls(groups, lr=0.1)

        return {
            "another shape": lambda: over((8, 3), (9,)),
            "a group less": lambda: over((8, 3)),
            "a group more": lambda: over((8, 3), (8,), (8,)),
            "another optimizer": lambda: over((8, 3), (8,), cls=torch.optim.SGD),
        }
