"""What the adapter of torchax refuses, and what its messages say to do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import ckpt_core as ckpt
from ckpt_torchax import load_into, to_torch
from tests.contract.advice.said import save, told
from tests.support import torchax_nets as nets

nn = torch.nn


def linear(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_a_lazy_module(tmp_path):
    module = nn.LazyLinear(2)
    with told("it is not initialized: run the lazy module once"):
        save(tmp_path / "a", model=module)
    module(torch.ones(1, 3))
    save(tmp_path / "a", model=module)
    again = linear()
    ckpt.restore(tmp_path / "a", model=again)
    assert same(module, again)


# Files


@pytest.mark.parametrize("call", [load_into, to_torch])
def test_a_class_for_the_module(tmp_path, call):
    model = linear()
    save(tmp_path / "a", model=model)
    names = {call.__name__: call, "path": tmp_path / "a", "Linear": torch.nn.Linear}
    with told("fills an object, got the class", of=TypeError) as said:
        call(tmp_path / "a", torch.nn.Linear)
    ins, outs = model.in_features, model.out_features
    assert same(eval(said.after("write ").replace("...", f"{ins}, {outs}"), names), model)
    with pytest.raises(TypeError, match="got a dict: for tensors by name, "):
        call(tmp_path / "a", {})


# Modules


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("x", torch.arange(3.0), persistent=False)


@pytest.mark.parametrize("action", ["outside of meta", "buffers"])
def test_buffers_on_meta_that_no_checkpoint_has(tmp_path, action):
    model = Buffered()
    save(tmp_path / "a", model=model)
    with torch.device("meta"):
        again = Buffered()
    with told("Make them outside of the meta device, or pass") as said:
        load_into(tmp_path / "a", again)
    if action == "outside of meta":
        again.register_buffer("x", torch.arange(3.0), persistent=False)
        load_into(tmp_path / "a", again)
    else:
        call = said.after("or pass ").rstrip(".").replace(", ...", "")
        names = {
            "load_into": load_into,
            "path": tmp_path / "a",
            "module": again,
            "tensor": torch.arange(3.0),
        }
        eval(call, names)
    assert np.asarray(again.x.jax()).tolist() == [0, 1, 2]
    assert np.asarray(again.w.jax()).tolist() == [1, 1]


def test_numbers_of_64_bits(tmp_path):
    module = nn.Module()
    module.register_buffer("n", torch.tensor([2**40]))
    save(tmp_path / "a", model=module)
    with torch.device("meta"):
        again = nn.Module()
        again.register_buffer("n", torch.tensor([0]))
    with told("Set jax_enable_x64, or load it with") as said:
        load_into(tmp_path / "a", again)
    call = said.after("load it with ").rstrip(".")
    back = eval(call, {"ckpt_core": ckpt, "path": tmp_path / "a"})
    assert back["model"]["n"].tolist() == [2**40]
    with jax.enable_x64(True):
        load_into(tmp_path / "a", again)
        assert np.asarray(again.n.jax()).tolist() == [2**40]


def test_entries_that_are_not_the_modules(tmp_path):
    module = linear()
    hook = lambda m, state, prefix, local: state.update(extra=torch.ones(1))  # noqa: E731
    module._register_state_dict_hook(hook)
    with told("instead of the module, and restore with load_state_dict") as said:
        save(tmp_path / "a", model=module)
    state = eval("module.state_dict()", {"module": module})
    assert "module.state_dict()" in said.text
    save(tmp_path / "a", model=state)
    found = to_torch(tmp_path / "a")
    found.pop("extra")
    again = linear(1)
    again.load_state_dict(found)
    assert torch.equal(again.weight, module.weight)


def test_another_optimizer(tmp_path):
    model = linear()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save(tmp_path / "a", optimizer=optimizer)
    with told("Give the optimizer the parameters it had, in the same"):
        ckpt.restore(tmp_path / "a", optimizer=torch.optim.Adam(nn.Linear(4, 2).parameters()))
    again = torch.optim.Adam(linear(1).parameters())
    ckpt.restore(tmp_path / "a", optimizer=again)
    assert torch.equal(
        again.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


# JAX arrays


def test_a_tensor_that_was_donated(tmp_path):
    with nets.torchax_enabled():
        model = linear().to("jax")
        weights = dict(model.named_parameters())
        buffers: dict[str, Any] = {}
        returned = {
            name: nets.torch_view(jnp.asarray(value.jax()) + 1) for name, value in weights.items()
        }
        model.weight.jax().delete()
        with told("the step returned: pass that instead, such as model=") as said:
            save(tmp_path / "a", model=model)
        item = eval(f"dict({said.after('such as ')})", {"weights": returned, "buffers": buffers})
        save(tmp_path / "a", **item)
    back = to_torch(tmp_path / "a", linear(1))
    assert np.allclose(back.weight.detach().numpy(), linear().weight.detach().numpy() + 1)
