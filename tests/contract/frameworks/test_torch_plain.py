"""PyTorch without torchax: tensors, modules and optimizers on the CPU; and weights of a decoder, by rules."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.core import FrozenDict
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.torch import save_file
from torch import nn

import ckpt_core as ckpt
from ckpt_torchax import to_torch
from examples.decoder_rules import GEMMA
from tests.support.torchax_nets import DTYPES, Holder, bits, bytes_of, same, values


def test_every_dtype_bit_by_bit(tmp_path):
    found = {name: bits(name) for name in DTYPES}
    ckpt.save(tmp_path / "a", model=found)
    target = {name: torch.zeros_like(value) for name, value in found.items()}
    ckpt.restore(tmp_path / "a", model=dict(target))
    for state in (target, to_torch(tmp_path / "a")):
        assert [bytes_of(state[name]) for name in DTYPES] == [*map(bytes_of, found.values())]


def test_each_further_tensor_costs_a_restore_the_same(tmp_path):
    def calls_of(count: int) -> int:
        state = {f"{n}": {"w": torch.ones(2)} for n in range(count)}
        ckpt.save(tmp_path / f"{count}", state)
        calls: list[str] = []
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        ckpt.restore(tmp_path / f"{count}", state)
        sys.setprofile(None)
        return len(calls)

    _, few, more, many = map(calls_of, (25, 50, 100, 200))  # the first one imports
    assert many - more < 2.5 * (more - few)


STRIDES = {
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.zeros(0, 3),
    "requires_grad": lambda: torch.ones(2, requires_grad=True),
    "bfloat16, sliced": lambda: torch.arange(12).to(torch.bfloat16)[1::2],
}


@pytest.mark.parametrize("name", STRIDES)
def test_however_it_lies_in_memory(tmp_path, name):
    make = STRIDES[name]
    ckpt.save(tmp_path / "a", {"x": make()})
    target = {"x": make()}
    if name != "expanded":
        target["x"].detach().zero_()
    else:
        target["x"] = torch.zeros(3).expand(2, 3)
    loaded = ckpt.load(tmp_path / "a", target)["x"]
    assert loaded is not target["x"] and loaded.requires_grad == target["x"].requires_grad
    assert torch.equal(loaded, make()) and not target["x"].any()
    restored = ckpt.restore(tmp_path / "a", state=target)["state"]["x"]
    assert restored is target["x"]
    assert torch.equal(restored, make())


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "complex32": lambda: torch.zeros(2, dtype=torch.complex32),
}


@pytest.mark.filterwarnings("ignore")  # torch warns of prototypes and of what is deprecated
@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_saved_is_named(tmp_path, word):
    with pytest.raises(ckpt.UnsupportedLeaf, match=word) as caught:
        ckpt.save(tmp_path / "a", model=nn.Sequential(Holder(REFUSED[word]())))
    assert caught.value.leaf == "0.x"
    assert not (tmp_path / "a").exists()


def test_meta_tensors_have_nothing_to_save(tmp_path):
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"weight.*no values"):
        ckpt.save(tmp_path / "a", model=model)


def test_other_objects_with_a_state_dict(tmp_path):
    ckpt.save(tmp_path / "a", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    fresh = torch.amp.GradScaler("cpu")
    ckpt.restore(tmp_path / "a", scaler=fresh)
    assert fresh.state_dict()["scale"] == 8.0


def test_objects_of_torch_without_state_are_refused_by_type(tmp_path):
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"torch\.dtype"):
        ckpt.save(tmp_path / "a", {"dtype": torch.float32})


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, momentum=0.9),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    ],
)
def test_optimizers_of_plain_torch_go_on_exactly(tmp_path, make):
    def start() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        return model, make(model.parameters())

    def step(model: Any, optimizer: Any, seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()

    model, optimizer = start()
    step(model, optimizer, 1)
    ckpt.save(tmp_path / "a", model=model, optimizer=optimizer)
    other, fresh = start()
    ckpt.restore(tmp_path / "a", model=other, optimizer=fresh)
    for seed in (2, 3):
        step(model, optimizer, seed)
        step(other, fresh, seed)
    assert same(values(model), values(other))
    groups = [[g["lr"] for g in o.param_groups] for o in (optimizer, fresh)]
    assert groups[0] == groups[1]
    ckpt.restore(tmp_path / "a", optimizer=fresh)  # into one that has a state, too
    assert (
        ckpt.load(tmp_path / "a")["optimizer"]["state"].keys() == fresh.state_dict()["state"].keys()
    )


class Average(nn.Module):
    """Counts its updates in a number, which state_dict leaves out."""

    def __init__(self, updates: int) -> None:
        super().__init__()
        self.updates = updates
        self.layer = nn.Linear(2, 2)


class Counting(Average):
    def get_extra_state(self) -> Any:
        return {"updates": self.updates}

    def set_extra_state(self, state: Any) -> None:
        self.updates = int(state["updates"])


def test_a_number_that_is_no_state_is_warned_of(tmp_path):
    ckpt.save(tmp_path / "a", nets={"ema": nn.Sequential(Average(5))})
    ckpt.restore(tmp_path / "a", nets={"ema": nn.Sequential(Average(5).eval())})
    target = nn.Sequential(Average(0))
    with pytest.warns(UserWarning, match=r"nets: ema/0\.updates: .* saved 5, wanted 0\..*Set them"):
        ckpt.restore(tmp_path / "a", nets={"ema": target})
    ckpt.restore(tmp_path / "a", nets={"ema": target}, static="target")
    assert target[0].updates == 0
    ckpt.save(tmp_path / "b", model=Counting(5))  # which saves it itself
    counting = Counting(0)
    ckpt.restore(tmp_path / "b", model=counting)
    assert counting.updates == 5


class Two(nn.Module):
    """Two layers of one shape, and one of another."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)


def step(model: Any, optimizer: Any) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()


def moments(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        name: (
            optimizer.state[parameter]["exp_avg"].tolist(),
            float(optimizer.state[parameter]["step"]),
        )
        for name, parameter in model.named_parameters()
    }


def rates(optimizer: Any, model: Any) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    return {names[id(one)]: group["lr"] for group in groups for one in group["params"]}


def grouped(model: Any, reverse: bool, named: bool) -> Any:
    """Weights and biases with rates of their own."""
    every = list(model.named_parameters())[:: -1 if reverse else 1]
    parts = [[one for one in every if one[0].endswith(end)] for end in ("weight", "bias")]
    groups = [
        {"params": part if named else [parameter for _, parameter in part], "lr": lr}
        for part, lr in zip(parts, (0.1, 0.01), strict=True)
    ]
    return torch.optim.Adam(groups[:: -1 if reverse else 1])


@dataclasses.dataclass(slots=True)
class Training:
    model: Any
    optimizer: Any


TOGETHER = {
    "items": lambda model, optimizer: {"model": model, "optimizer": optimizer},
    "containers": lambda model, optimizer: {"model": {"models": [model]}, "optimizer": optimizer},
    "one item": lambda model, optimizer: {"state": {"model": model, "by": (optimizer,)}},
    "dataclass": lambda model, optimizer: {"state": Training(model, optimizer)},
    "registered": lambda model, optimizer: {"state": FrozenDict({"m": model, "by": optimizer})},
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("how", TOGETHER)
def test_optimizers_are_matched_by_names(named, stepped, how, tmp_path):
    def items(model: Any, optimizer: Any) -> dict[str, Any]:
        return TOGETHER[how](None if named else model, optimizer)

    model = Two(0)
    optimizer = grouped(model, False, named)
    step(model, optimizer)
    ckpt.save(tmp_path / "a", items=items(model, optimizer))
    other = Two(1)
    target = grouped(other, True, named)
    if stepped:
        step(other, target)
        step(other, target)
        for group in target.param_groups:
            group["lr"] = 7.0
    ckpt.restore(tmp_path / "a", items=items(other, target))
    assert moments(other, target) == moments(model, optimizer)
    assert rates(target, other) == rates(optimizer, model)
    if named:
        names = [name for group in target.param_groups for name in group["param_names"]]
        assert names[0] == "c.bias"
    again = tmp_path / "b"  # and what is saved then restores again
    ckpt.save(again, items=items(other, target))
    last = Two(2)
    final = grouped(last, False, named)
    ckpt.restore(again, items=items(last, final))
    assert moments(last, final) == moments(model, optimizer)


@pytest.mark.parametrize("stepped", [False, True])
def test_an_optimizer_in_one_item_with_its_model_may_be_renamed_or_left_out(stepped, tmp_path):
    model = Two(0)
    optimizer = grouped(model, False, False)
    step(model, optimizer)
    ckpt.save(tmp_path / "a", {"model": model, "opt": optimizer})
    other = Two(1)
    target = grouped(other, True, False)
    if stepped:
        step(other, target)
    before = str(target.state_dict())
    ckpt.restore(tmp_path / "a", {"model": other, "opt": target}, only="model/**")
    assert str(target.state_dict()) == before
    assert torch.equal(other.a.weight, model.a.weight)
    ckpt.restore(tmp_path / "a", {"model": other, "by": target}, rename={"opt": "by"})
    assert moments(other, target) == moments(model, optimizer)
    few = torch.optim.Adam([model.a.weight])
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", {"model": model, "opt": few})
    assert caught.value.__notes__ == ["ckpt: this is opt of the item"]


def test_a_scheduler_goes_by_the_position_of_groups(tmp_path):
    def make(reverse: bool) -> dict[str, Any]:
        model = Two(0)
        optimizer = grouped(model, reverse, False)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"model": model, "optimizer": optimizer, "schedule": schedule}

    ckpt.save(tmp_path / "a", items=make(False))
    ckpt.restore(tmp_path / "a", items=make(False))
    with pytest.warns(UserWarning, match="Keep the order of the groups"):
        ckpt.restore(tmp_path / "a", items=make(True))


def test_optimizers_without_names_or_with_others_go_by_position(tmp_path):
    model = Two(0)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    ckpt.save(tmp_path / "alone", optimizer=optimizer)
    ckpt.save(tmp_path / "both", optimizer=optimizer, model=model)
    other = Two(1)
    target = torch.optim.Adam(other.parameters())
    ckpt.restore(tmp_path / "alone", optimizer=target, unexpected="error")
    with pytest.warns(UserWarning, match=r"by position: .*a\.weight -> \?"):
        ckpt.restore(tmp_path / "both", optimizer=target)
    assert moments(other, target) == moments(model, optimizer)
    wrapped = nn.Sequential(other)
    with pytest.warns(UserWarning, match=r"by position: .*a\.weight -> 0\.a\.weight"):
        ckpt.restore(
            tmp_path / "both",
            optimizer=target,
            model=wrapped,
            rename={"a": "0.a", "b": "0.b", "c": "0.c"},
        )
    assert moments(other, target) == moments(model, optimizer)
    with pytest.raises(ckpt.StructureMismatch, match="groups of"):
        ckpt.restore(tmp_path / "both", optimizer=grouped(other, False, False), model=other)


def test_one_optimizer_over_two_models_whose_parameters_have_the_same_names(tmp_path):
    def both(seed: int, reverse: bool) -> Any:
        models = [Two(seed), Two(seed + 1)]
        every = [one for model in models for one in model.parameters()]
        return models, torch.optim.Adam(every[:: -1 if reverse else 1])

    (one, two), optimizer = both(0, False)
    step(one, optimizer)
    step(two, optimizer)
    ckpt.save(tmp_path / "a", one=one, two=two, optimizer=optimizer)
    (first, second), target = both(2, True)
    ckpt.restore(tmp_path / "a", two=second, one=first, optimizer=target)
    for model, other in ((one, first), (two, second)):
        assert moments(other, target) == moments(model, optimizer)
    with pytest.warns(UserWarning, match="in the same call"):
        ckpt.restore(tmp_path / "a", optimizer=both(2, False)[1])


VOCABULARY, WIDTH, HEADS, KV_HEADS, SIZE, HIDDEN, LAYERS = 48, 16, 4, 2, 8, 24, 3
LINEAR = {
    "self_attn.q_proj": (HEADS * SIZE, WIDTH),
    "self_attn.k_proj": (KV_HEADS * SIZE, WIDTH),
    "self_attn.v_proj": (KV_HEADS * SIZE, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * SIZE),
    "mlp.gate_proj": (HIDDEN, WIDTH),
    "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
}
NORMS = {
    "before_attention": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}


def test_each_weight_of_a_gemma_comes_to_its_place(tmp_path, mesh):
    """tests/house/test_examples.py runs the rules of a Llama, which are nearly the same, up to equal logits."""
    shapes = LINEAR | dict.fromkeys(NORMS.values(), (WIDTH,))
    state = {
        f"model.layers.{layer}.{name}.weight": torch.randn(shape)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    state["model.embed_tokens.weight"] = torch.randn(VOCABULARY, WIDTH)
    state["model.norm.weight"] = torch.randn(WIDTH)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})

    def stacked(name: str) -> Any:
        return np.stack([state[f"model.layers.{n}.{name}.weight"].numpy() for n in range(LAYERS)])

    def projected(name: str, heads: int) -> Any:
        return (
            stacked(f"self_attn.{name}").reshape(LAYERS, heads, SIZE, WIDTH).transpose(0, 3, 1, 2)
        )

    gate, up = (stacked(f"mlp.{name}").mT for name in ("gate_proj", "up_proj"))
    q, keys, values = (
        projected(name, heads)
        for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS))
    )
    out = stacked("self_attn.o_proj").reshape(LAYERS, WIDTH, HEADS, SIZE).transpose(0, 2, 3, 1)
    expected = {
        "embed": state["model.embed_tokens.weight"].numpy(),
        "norm": state["model.norm.weight"].numpy(),
        "layers": {
            "attention": {"q": q, "kv": np.stack([keys, values], 1), "out": out},
            "mlp": {"gate_up": np.concatenate([gate, up], -1), "down": stacked("mlp.down_proj").mT},
            "norm": {ours: stacked(theirs) for ours, theirs in NORMS.items()},
        },
    }

    def leaf(value: Any) -> Any:
        spec = (
            PartitionSpec(*[None] * (value.ndim - 1), "model")
            if value.ndim > 2
            else PartitionSpec()
        )
        return jax.ShapeDtypeStruct(value.shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = ckpt.load(tmp_path, jax.tree.map(leaf, expected), rules=GEMMA)
    assert params["layers"]["attention"]["q"].sharding.spec[-1] == "model"
    jax.tree.map(np.testing.assert_array_equal, params, expected)
