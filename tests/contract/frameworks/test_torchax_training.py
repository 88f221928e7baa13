"""torchax: random keys, optimizers, sharded models, and whole trainings go on exactly; large, and in two processes."""

import collections
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import ckpt_core as ckpt
from tests.support import torchax_nets as nets
from tests.support.launch import launch, reports
from tests.support.torchax_nets import make_env, net, same, tensor, torchax, values  # noqa: F401 (fixture)
from tests.support.units import MIB

F = nn.functional


def test_a_key_that_no_training_used_is_refused(env, tmp_path):
    torchax.disable_globally()
    caught: list[BaseException] = []

    def work(action: Any) -> None:
        try:
            action()
        except BaseException as error:
            caught.append(error)

    def in_thread(action: Any) -> None:
        thread = threading.Thread(target=work, args=(action,), name="saver")
        thread.start()
        thread.join()

    in_thread(lambda: ckpt.save(tmp_path / "a", env=env))
    assert isinstance(caught.pop(), ckpt.CheckpointError)
    assert not (tmp_path / "a").exists()
    ckpt.save(tmp_path / "a", env=env)
    in_thread(lambda: ckpt.restore(tmp_path / "a", env=env))
    assert "thread 'saver' has a torchax random key of its own" in str(caught.pop())

    def trained_here() -> None:
        env.manual_seed(5)
        ckpt.save(tmp_path / "b", env=env)

    in_thread(trained_here)
    assert caught == []
    key = ckpt.load(tmp_path / "b")["env"]["prng"]
    assert key.tolist() == jax.random.PRNGKey(5).tolist()
    torchax.enable_globally()


@pytest.mark.parametrize("typed", [True, False])
def test_dropout_goes_on_exactly(env, tmp_path, typed):
    env.param.prng = jax.random.key(3) if typed else jax.random.PRNGKey(3)
    ones = tensor(jnp.ones(1000))
    F.dropout(ones)
    ckpt.save(tmp_path / "a", env=env)
    expected = [F.dropout(ones).jax().tolist() for _ in range(3)]
    env.manual_seed(9) if typed else setattr(env.param, "prng", jax.random.key(9))
    ckpt.restore(tmp_path / "a", env=env)
    assert jax.dtypes.issubdtype(env.param.prng.dtype, jax.dtypes.prng_key) == typed
    assert [F.dropout(ones).jax().tolist() for _ in range(3)] == expected


def test_compiled_code_that_draws_goes_on_exactly_or_is_reported(env, tmp_path):
    ckpt.save(tmp_path / "good", env=env)
    draw, ones = nets.jax_jit(lambda x: F.dropout(x)), tensor(jnp.ones(100))
    draw(ones)
    if metadata.version("torchax") != "0.0.13":  # later ones thread the key through the step
        ckpt.save(tmp_path / "a", env=env)
        expected = [draw(ones).jax().tolist() for _ in range(3)]
        env.manual_seed(9)
        ckpt.restore(tmp_path / "a", env=env)
        assert [draw(ones).jax().tolist() for _ in range(3)] == expected
        return
    assert isinstance(env.param.prng, jax.core.Tracer)
    with pytest.raises(ckpt.CheckpointError, match=r"is a tracer.*Upgrade torchax"):
        ckpt.save(tmp_path / "a", env=env)
    ckpt.restore(tmp_path / "good", env=env)
    assert not isinstance(env.param.prng, jax.core.Tracer)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "chain": lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "masked": lambda: optax.masked(optax.adam(1e-3), {"embed.weight": True, "head.weight": False}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optax_states_with_torchax_leaves_are_set_in_place(tmp_path, name):
    model = net(0)
    weights = {"embed.weight": model.embed.weight, "head.weight": model.head.weight}
    init = OPTIMIZERS[name]().init
    state = jax.tree.map(lambda leaf: leaf + 1, nets.call_jax(init, weights))
    ckpt.save(tmp_path / "a", weights=weights, opt_state=state)
    fresh = nets.call_jax(init, weights)
    restored = ckpt.restore(tmp_path / "a", opt_state=fresh)
    assert jax.tree.structure(restored["opt_state"]) == jax.tree.structure(state)
    pairs = zip(*map(jax.tree.leaves, (restored["opt_state"], state, fresh)), strict=True)
    for one, other, target in pairs:
        assert type(one) is type(other) is torchax.tensor.Tensor
        assert one is target, "set in place"
        assert one.jax().dtype == other.jax().dtype
        np.testing.assert_array_equal(one.jax(), other.jax())


def torch_optimizer(model: Any) -> tuple[Any, list[Any]]:
    groups = [
        {"params": [model.embed.weight], "lr": 0.1},
        {"params": [model.head.weight, model.norm.weight], "betas": (0.8, 0.9)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
    ]
    return optimizer, schedulers


def run(model: Any, optimizer: Any, schedulers: list[Any], steps: range) -> None:
    """Steps with gradients made by hand: F.linear has no autograd in torchax."""
    for step in steps:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                numbers = np.random.default_rng(step).normal(size=tuple(parameter.shape))
                array = numbers.astype(np.float32)
                on_jax = isinstance(parameter, torchax.tensor.Tensor)
                parameter.grad = tensor(array) if on_jax else torch.from_numpy(array)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


@pytest.mark.parametrize("on_jax", [True, False])
def test_torch_optimizers_keep_their_int_keys(tmp_path, on_jax):
    def start(seed: int) -> tuple[Any, Any, list[Any]]:
        if on_jax:
            model = net(seed)
        else:
            torch.manual_seed(seed)
            model = nets.Net()
        return model, *torch_optimizer(model)

    more = range(4, 14) if not on_jax else range(4, 8)  # torchax compiles anew for each step
    model, optimizer, schedulers = start(0)
    run(model, optimizer, schedulers, range(4))
    items = {"model": model, "optimizer": optimizer, "schedulers": schedulers}
    pending = ckpt.save_async(tmp_path / "a", **items)
    run(model, optimizer, schedulers, more)
    pending.result()

    saved = ckpt.load(tmp_path / "a", as_numpy=True)["optimizer"]
    assert set(saved["state"]) == {0, 1, 2}
    assert float(saved["state"][0]["step"]) == 4, "shared with the live optimizer"
    assert saved["param_groups"][1]["betas"] == (0.8, 0.9)
    assert saved["param_groups"][0]["foreach"] is None

    other, fresh, fresh_schedulers = start(1)
    targets = {"model": other, "optimizer": fresh, "schedulers": fresh_schedulers}
    assert fresh.state_dict()["state"] == {}
    ckpt.restore(tmp_path / "a", **targets)
    assert list(fresh.state_dict()["state"]) == [0, 1, 2]
    assert type(fresh.state_dict()["state"][0]["step"]) is torch.Tensor
    assert isinstance(fresh_schedulers[2].milestones, collections.Counter)
    run(other, fresh, fresh_schedulers, more)
    assert same(values(model), values(other))
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def shard(module: nn.Module, count: int) -> nn.Module:
    """FSDP by hand: each tensor with a dimension that 8 divides, over `count` devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",))
    for parameter in [*module.parameters(), *module.buffers()]:
        spec = jax.P(*["data" if size % 8 == 0 else None for size in parameter.shape][:1])
        parameter.apply_jax_(jax.device_put, jax.NamedSharding(mesh, spec))
    return module


def wide(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32)).to("jax")


@pytest.mark.parametrize("count", [1, 2, 8])
def test_each_tensor_keeps_the_sharding_of_the_target(tmp_path, count):
    model = shard(wide(0), 4)
    ckpt.save(tmp_path / "a", model=model)
    other = shard(wide(1), count)
    shardings = {name: value.jax().sharding for name, value in other.state_dict().items()}
    ckpt.restore(tmp_path / "a", model=other)
    assert {name: v.jax().sharding for name, v in other.state_dict().items()} == shardings
    assert len(other[0].weight.jax().sharding.device_set) == count
    assert same(values(model), values(other))


def test_optimizer_state_lies_where_its_parameter_does(tmp_path):
    def start(count: int) -> tuple[Any, Any]:
        model = shard(nn.Linear(8, 16, bias=False).to("jax"), count)
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)

    model, optimizer = start(4)
    model.weight.grad = torchax.tensor.Tensor(model.weight.jax() * 2, torchax.default_env())
    optimizer.step()
    ckpt.save(tmp_path / "a", optimizer=optimizer)
    moments = optimizer.state[model.weight]["momentum_buffer"].jax()
    for count in (2, 8):
        other, fresh = start(count)
        ckpt.restore(tmp_path / "a", optimizer=fresh)
        restored = fresh.state[other.weight]["momentum_buffer"].jax()
        assert restored.sharding == other.weight.jax().sharding
        np.testing.assert_array_equal(restored, moments)


def test_an_optimizer_of_plain_torch_goes_on_with_torchax(tmp_path):
    on_cpu = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.AdamW(on_cpu.parameters())
    on_cpu.weight.grad = torch.ones(3, 4)
    optimizer.step()
    ckpt.save(tmp_path / "a", optimizer=optimizer)
    model = nn.Linear(4, 3, bias=False).to("jax")
    fresh = torch.optim.AdamW(model.parameters())
    ckpt.restore(tmp_path / "a", optimizer=fresh)
    state = fresh.state[model.weight]
    assert type(state["exp_avg"]) is torchax.tensor.Tensor
    assert type(state["step"]) is torch.Tensor, "torch counts on the CPU"
    ckpt.save(tmp_path / "b", optimizer=fresh)
    back = torch.optim.AdamW(on_cpu.parameters())
    ckpt.restore(tmp_path / "b", optimizer=back)
    assert type(back.state[on_cpu.weight]["exp_avg"]) is torch.Tensor
    assert torch.equal(
        back.state[on_cpu.weight]["exp_avg"], optimizer.state[on_cpu.weight]["exp_avg"]
    )


def test_a_checkpoint_of_the_article_loads(tmp_path):
    """Orbax's own, as the article's script writes it: weights by name, and two numbers."""
    ocp = pytest.importorskip("orbax.checkpoint")
    model, other = net(0), net(1)
    weights = {name: value.jax() for name, value in model.state_dict().items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"weights": weights, "epoch": 2, "global_step": 200})
    target = {"weights": other, "epoch": 0, "global_step": 0}
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"weights: load changes nothing.*restore"):
        ckpt.load(tmp_path / "a", target)
    restored = ckpt.restore(tmp_path / "a", state=target)["state"]
    assert restored["weights"] is other
    assert int(restored["global_step"]) == 200
    assert same(values(model), values(other))
    ckpt.save(tmp_path / "b", model=model)
    with ocp.StandardCheckpointer() as checkpointer:
        theirs = checkpointer.restore(tmp_path / "b" / "model")
    assert same({name: np.asarray(value) for name, value in theirs.items()}, values(model))


def test_text_keys_of_other_tools_become_ints(tmp_path):
    """With the keys "0", "1" torch itself takes the state, and begins with zero moments."""
    ocp = pytest.importorskip("orbax.checkpoint")

    def start() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = start()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moments = {
        str(i): {"momentum_buffer": state["momentum_buffer"].numpy()}
        for i, state in optimizer.state_dict()["state"].items()
    }
    groups = [{"lr": 0.1, "momentum": 0.9, "params": [0, 1]}]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"state": moments, "param_groups": groups})
    _, fresh = start()
    ckpt.restore(tmp_path / "a", state=fresh, missing="keep")
    state = fresh.state_dict()["state"]
    assert list(state) == [0, 1]
    assert torch.equal(
        state[0]["momentum_buffer"], torch.from_numpy(moments["0"]["momentum_buffer"])
    )
    assert fresh.param_groups[0]["lr"] == 0.1


def test_tpu_tensors_are_refused_by_type(tmp_path):
    class Tensor(torch.Tensor):
        __module__ = "torch_tpu.tensor"

    with pytest.raises(ckpt.UnsupportedLeaf, match="TorchTPU tensors are not supported") as caught:
        ckpt.save(tmp_path / "a", model=nets.Holder(torch.zeros(2).as_subclass(Tensor)))
    assert caught.value.type_name.endswith("Tensor")
    assert "x: " in str(caught.value)


def test_only_parameters(tmp_path):
    model, other = net(0), net(1)
    model.norm.running_mean.add_(1)
    ckpt.save(tmp_path / "a", model=model)
    ckpt.restore(tmp_path / "a", model=other, only=nn.Parameter)
    np.testing.assert_array_equal(other.head.weight.jax(), model.head.weight.jax())
    assert float(other.norm.running_mean.jax().sum()) == 0
    ckpt.restore(tmp_path / "a", model=other, only="norm.*")
    assert float(other.norm.running_mean.jax().sum()) == 8


MEMORY = """
import json, sys
import torch
from torch import nn
from tests.support.torchax_nets import torchax
import jax, numpy as np
import ckpt_core as ckpt
from ckpt_torchax import load_into

def memory(name):
    text = open("/proc/self/status").read()
    return int(text.partition(name + ":")[2].split()[0]) * 1024

class Large(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.layers[0].weight

def meta(*arguments):
    with torch.device("meta"):
        return Large(*arguments)

path, warm, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
load_into(warm, meta(1, 64))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
base = memory("VmRSS")
model = load_into(path, meta(count, 2048))
size = sum(p.jax().nbytes for p in model.parameters())
assert model.head.weight is model.layers[0].weight
print(json.dumps([size, memory("VmHWM") - base, float(model.layers[count - 1].weight.jax()[5, 5])]))
"""


def large(count: int, width: int) -> dict[str, Any]:
    state: dict[str, Any] = {
        f"layers.{i}.weight": jnp.full((width, width), float(i)) for i in range(count)
    }
    state["_tied_weights"] = {"layers.0.weight": {"head.weight": True}}
    return state


@pytest.mark.parametrize(("count", "times"), [(20, 1.2), (64, 1.1)])
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_model_is_in_memory_once(run_python, tmp_path, count, times):
    ckpt.save(tmp_path / "large", model=large(count, 2048))
    ckpt.save(tmp_path / "warm", model=large(1, 64))
    arguments = [str(tmp_path / "large"), str(tmp_path / "warm"), str(count)]
    flags = "--xla_force_host_platform_device_count=1"
    size, peak, value = run_python(MEMORY, *arguments, timeout_secs=200, XLA_FLAGS=flags)
    assert size == count * 16 * MIB
    assert value == count - 1
    assert peak <= times * size, f"{peak / size:.2f} times"


TWO = """
import torch
from torch import nn
from tests.support.torchax_nets import torchax

sharding = NamedSharding(mesh, P("data"))
env = torchax.default_env()
env.manual_seed(7)  # else each process draws its own, which the save refuses

def module(offset):
    made = nn.Linear(4, 8, bias=False)
    array = put(np.arange(32, dtype=np.float32).reshape(8, 4) + offset)
    made.weight = nn.Parameter(torchax.tensor.Tensor(array, env))
    return made

model = module(1)
assert not model.weight.jax().is_fully_addressable
ckpt.save(directory, model=model, env=env)
target = module(100)
weight = target.weight
ckpt.restore(directory, model=target, env=env)
parts = {str(s.index): s.data.tolist() for s in target.weight.jax().addressable_shards}
report(parts=parts, same=weight is target.weight and weight.jax().sharding == sharding)
"""


@pytest.mark.always
def test_two_processes_save_and_restore_their_shards(tmp_path):
    directory = tmp_path / "run"
    rows: list[float] = []
    for one in reports(launch(TWO, directory)):
        assert one["same"]
        rows += [number for part in one["parts"].values() for row in part for number in row]
    assert sorted(rows) == [float(number) for number in range(1, 33)]
    found = [path.stat().st_size > 40 for path in (directory / "model").glob("checksums/process_*")]
    assert found == [True, True]
    loaded = ckpt.load(directory, as_numpy=True)["model"]["weight"]
    assert loaded.ravel().tolist() == [float(number) for number in range(1, 33)]
