"""What the adapter of torchax refuses, and what its messages say to do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.advice.said import told

torch = pytest.importorskip("torch")
nets = pytest.importorskip("tests.support.torchax_nets")
import ckpt_torchax  # noqa: E402
from ckpt_torchax import load_into, to_torch  # noqa: E402

nn = torch.nn
FAST = ckpt.Options(durable=False)


def save(path: Any, *state: Any, **named: Any) -> None:
    ckpt.save(path, *state, options=FAST, **named)


def linear(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


# Tensors that cannot be saved


TENSORS: dict[str, tuple[str, Any, Any]] = {
    "sparse": (
        "torchax/ckpt_torchax/_bits.py: : save tensor.to_dense()",
        lambda: torch.eye(2).to_sparse(),
        lambda text, tensor: {"w": eval(text.rpartition("save ")[2], {"tensor": tensor})},
    ),
    "quantized": (
        "torchax/ckpt_torchax/_bits.py: it is quantized: save int_repr(), scale and zero point",
        lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.quint8),
        lambda _, t: {"w": t.int_repr(), "scale": t.q_scale(), "zero": t.q_zero_point()},
    ),
    "nested": (
        "torchax/ckpt_torchax/_bits.py: it is nested: save its parts",
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda _, t: list(t.unbind()),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_are_not_plain(tmp_path: Path, kind: str):
    key, make, action = TENSORS[kind]
    tensor = make()
    with told(key) as said:
        save(tmp_path / "a", {"w": tensor})
    state = action(said.text, tensor)
    save(tmp_path / "a", state)
    found = jax.tree.leaves(ckpt.load(tmp_path / "a"))
    assert all(
        np.array_equal(one, np.asarray(two))
        for one, two in zip(found, jax.tree.leaves(state), strict=True)
    )


def test_a_lazy_module(tmp_path: Path):
    module = nn.LazyLinear(2)
    with told("torchax/ckpt_torchax/_bits.py: it is not initialized: run the lazy module once"):
        save(tmp_path / "a", model=module)
    module(torch.ones(1, 3))
    save(tmp_path / "a", model=module)
    again = linear()
    ckpt.restore(tmp_path / "a", model=again)
    assert same(module, again)


def test_a_dtype_that_torch_lacks(tmp_path: Path):
    save(tmp_path / "a", {"w": jnp.ones(2, jnp.float8_e4m3b11fnuz)})
    with told("torchax/ckpt_torchax/_bits.py: : load it as numpy with") as said:
        to_torch(tmp_path / "a")
    back = eval(said.after("numpy with "), {"ckpt_core": ckpt, "path": tmp_path / "a"})
    assert back["w"].tolist() == [1, 1]


# Files


def test_an_object_in_a_file(tmp_path: Path):
    model = linear()
    torch.save(model, tmp_path / "a.pt")
    with told(
        "torchax/ckpt_torchax/_files.py: the file, save model.state_dict() instead, or"
    ) as said:
        ckpt_torchax.import_file(tmp_path / "a.pt", tmp_path / "x")
    trusted = torch.load(tmp_path / "a.pt", weights_only=False)
    state = eval(said.between("the file, save ", " instead"), {"model": trusted})
    torch.save(state, tmp_path / "b.pt")
    assert same(load_into(tmp_path / "b.pt", linear(1)), model)
    eval(
        f"{said.after('itself with ')}(path, model=model)",
        {"ckpt_core": ckpt, "path": tmp_path / "c", "model": trusted},
    )
    assert same(load_into(tmp_path / "c", linear(1)), model)


def test_what_is_no_state_dict(tmp_path: Path):
    model = linear()
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "a.pt")
    with told(
        "torchax/ckpt_torchax/_fill.py: , so it is no state_dict: make a checkpoint of it with"
    ) as said:
        load_into(tmp_path / "a.pt", linear(1))
    call = said.between("of it with ", ", and load")
    eval(call, {"ckpt_torchax": ckpt_torchax, "file": tmp_path / "a.pt", "path": tmp_path / "a"})
    rename = {"model/weight": "weight", "model/bias": "bias"}
    again = load_into(tmp_path / "a", linear(1), rename=rename, unexpected="ignore")
    assert same(again, model)


def test_arguments_for_a_file_of_torch(tmp_path: Path):
    model = linear()
    torch.save({"w": model.weight.detach(), "bias": model.bias.detach()}, tmp_path / "a.pt")
    with told(
        "torchax/ckpt_torchax/_load_into.py: need a checkpoint or safetensors: make a"
    ) as said:
        load_into(tmp_path / "a.pt", linear(1), rename={"w": "weight"})
    call = said.between("of the file with ", ", and")
    eval(call, {"ckpt_torchax": ckpt_torchax, "file": tmp_path / "a.pt", "path": tmp_path / "a"})
    assert same(load_into(tmp_path / "a", linear(1), rename={"w": "weight"}), model)


def test_the_path_comes_first(tmp_path: Path):
    model = linear()
    save(tmp_path / "a", model=model)
    path = tmp_path / "a"
    with pytest.raises(TypeError, match="the path comes first, as in ") as caught:
        load_into(linear(1), path)  # pyright: ignore[reportArgumentType]
    call = str(caught.value).rpartition("as in ")[2]
    assert same(eval(call, {"load_into": load_into, "path": path, "module": linear(1)}), model)
    with pytest.raises(TypeError, match="for tensors by name, ") as caught:
        load_into(path, {})  # pyright: ignore[reportArgumentType]
    call = str(caught.value).rpartition("by name, ")[2]
    found = eval(call, {"ckpt_torchax": ckpt_torchax, "path": path})
    assert torch.equal(found["weight"], model.weight)


@pytest.mark.parametrize("call", [load_into, to_torch])
def test_a_class_for_the_module(tmp_path: Path, call: Any):
    model = linear()
    save(tmp_path / "a", model=model)
    names = {call.__name__: call, "path": tmp_path / "a", "Linear": torch.nn.Linear}
    with told(
        "torchax/ckpt_torchax/_modules.py: fills an object, got the class", of=TypeError
    ) as said:
        call(tmp_path / "a", torch.nn.Linear)
    ins, outs = model.in_features, model.out_features
    assert same(eval(said.after("write ").replace("...", f"{ins}, {outs}"), names), model)
    with pytest.raises(TypeError, match="got a dict: for tensors by name, "):
        call(tmp_path / "a", {})


def test_several_items(tmp_path: Path):
    model = linear()
    save(tmp_path / "a", one=model, two=linear(1))
    with told("torchax/ckpt_torchax/_tied.py: : name one with item="):
        load_into(tmp_path / "a", linear(2))
    assert same(load_into(tmp_path / "a", linear(2), item="one"), model)


def test_texts_in_safetensors(tmp_path: Path):
    save(tmp_path / "a", {"w": torch.ones(2), "epoch": "three"})
    with told("torchax/ckpt_torchax/_weights.py: : write .pt instead"):
        ckpt_torchax.export_file(tmp_path / "a", tmp_path / "a.safetensors")
    ckpt_torchax.export_file(tmp_path / "a", tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["epoch"] == "three"


# Modules


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("x", torch.arange(3.0), persistent=False)


@pytest.mark.parametrize("action", ["outside of meta", "buffers"])
def test_buffers_on_meta_that_no_checkpoint_has(tmp_path: Path, action: str):
    model = Buffered()
    save(tmp_path / "a", model=model)
    with torch.device("meta"):
        again = Buffered()
    with told(
        "torchax/ckpt_torchax/_modules.py: Make them outside of the meta device, or pass"
    ) as said:
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


def test_numbers_of_64_bits(tmp_path: Path):
    module = nn.Module()
    module.register_buffer("n", torch.tensor([2**40]))
    save(tmp_path / "a", model=module)
    with torch.device("meta"):
        again = nn.Module()
        again.register_buffer("n", torch.tensor([0]))
    with told("torchax/ckpt_torchax/_modules.py: Set jax_enable_x64, or load it with") as said:
        load_into(tmp_path / "a", again)
    call = said.after("load it with ").rstrip(".")
    back = eval(call, {"ckpt_core": ckpt, "path": tmp_path / "a"})
    assert back["model"]["n"].tolist() == [2**40]
    with jax.enable_x64(True):
        load_into(tmp_path / "a", again)
        assert np.asarray(again.n.jax()).tolist() == [2**40]


def test_entries_that_are_not_the_modules(tmp_path: Path):
    module = linear()
    hook = lambda m, state, prefix, local: state.update(extra=torch.ones(1))  # noqa: E731
    module._register_state_dict_hook(hook)
    with told(
        "torchax/ckpt_torchax/_modules.py: instead of the module, and restore with load_state_dict"
    ) as said:
        save(tmp_path / "a", model=module)
    state = eval("module.state_dict()", {"module": module})
    assert "module.state_dict()" in said.text
    save(tmp_path / "a", model=state)
    found = to_torch(tmp_path / "a")
    found.pop("extra")
    again = linear(1)
    again.load_state_dict(found)
    assert torch.equal(again.weight, module.weight)


def test_tied_and_separate(tmp_path: Path):
    class Two(nn.Module):
        def __init__(self, tied: bool):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            if tied:
                self.tie()

        def tie(self) -> None:
            self.b.weight = self.a.weight

    model = Two(tied=True)
    save(tmp_path / "a", model=model)
    again = Two(tied=False)
    key = "torchax/ckpt_torchax/_modules.py: tie them again after .to('jax'), which unties them"
    with pytest.warns(UserWarning, match="tie them again after") as caught:
        ckpt.restore(tmp_path / "a", model=again)
    assert key.partition(".py: ")[2] in str(caught[0].message)
    again.tie()
    ckpt.restore(tmp_path / "a", model=again)
    assert again.a.weight is again.b.weight and torch.equal(again.a.weight, model.a.weight)


def test_another_optimizer(tmp_path: Path):
    model = linear()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save(tmp_path / "a", optimizer=optimizer)
    with told(
        "torchax/ckpt_torchax/_optimizers.py: Give the optimizer the parameters it had, in the same"
    ):
        ckpt.restore(tmp_path / "a", optimizer=torch.optim.Adam(nn.Linear(4, 2).parameters()))
    again = torch.optim.Adam(linear(1).parameters())
    ckpt.restore(tmp_path / "a", optimizer=again)
    assert torch.equal(
        again.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


# JAX arrays


def test_a_tensor_that_was_donated(tmp_path: Path):
    with nets.torchax_enabled():
        model = linear().to("jax")
        weights = dict(model.named_parameters())
        buffers: dict[str, Any] = {}
        returned = {
            name: nets.torch_view(jnp.asarray(value.jax()) + 1) for name, value in weights.items()
        }
        model.weight.jax().delete()
        with told(
            "torchax/ckpt_torchax/_tensors.py: the step returned: pass that instead, such as model="
        ) as said:
            save(tmp_path / "a", model=model)
        item = eval(f"dict({said.after('such as ')})", {"weights": returned, "buffers": buffers})
        save(tmp_path / "a", **item)
    back = to_torch(tmp_path / "a", linear(1))
    assert np.allclose(back.weight.detach().numpy(), linear().weight.detach().numpy() + 1)


@pytest.mark.parametrize("action", ["the thread that trains", "seeded"])
def test_the_key_of_another_thread(tmp_path: Path, action: str):
    torchax = nets.torchax
    errors: list[BaseException] = []

    def work() -> None:
        try:
            if action == "seeded" and errors:
                torchax.default_env().manual_seed(3)
            save(tmp_path / "a", env=torchax.default_env())
        except ckpt.CheckpointError as error:
            errors.append(error)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    key = "torchax/ckpt_torchax/_environment.py: with torchax.default_env().manual_seed(...)"
    assert key.partition(".py: ")[2] in str(errors[0])
    assert len(errors) == (1 if action == "seeded" else 2)
    if action != "seeded":
        save(tmp_path / "a", env=torchax.default_env())
    ckpt.restore(tmp_path / "a", env=torchax.default_env())


def test_a_name_that_ckpt_uses_itself(tmp_path: Path):
    module = linear()
    module._tied_weights = nn.Parameter(torch.ones(1))
    with told("torchax/ckpt_torchax/_modules.py: is a name that ckpt uses itself"):
        save(tmp_path / "one", model=module)
    module = linear()
    module.tied = nn.Parameter(torch.ones(1))
    save(tmp_path / "one", model=module)
    with torch.no_grad():
        module.tied.zero_()
    ckpt.restore(tmp_path / "one", model=module)
    assert module.tied.item() == 1
