"""torchax: modules on JAX arrays, saved and truly restored, under the names of the bare ones."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import ckpt_core as ckpt
from tests.support import torchax_nets as nets
from tests.support.torchax_nets import Holder, make_env, net, same, tensor, torchax, values  # noqa: F401 (fixture)


def test_buffers_come_back_and_non_persistent_ones_stay(tmp_path):
    model = net(0)
    model.norm.running_mean.add_(3)
    model.norm.num_batches_tracked.add_(7)
    ckpt.save(tmp_path / "a", model=model)
    other = net(1)
    other.table.add_(5)
    ckpt.restore(tmp_path / "a", model=other)
    assert same(values(model), values(other))
    assert other.norm.num_batches_tracked.jax().dtype == jnp.int32
    assert int(other.norm.num_batches_tracked.jax()) == 7
    assert other.table.jax().tolist() == [5, 6, 7]


def test_a_module_follows_what_a_trainer_publishes(tmp_path):
    trained, live, follower = net(0, tied=True), net(1, tied=True), ckpt.Follower(tmp_path)
    with ckpt.Publisher(tmp_path) as publisher:
        for version in range(3):
            trained.norm.running_mean.add_(version)
            publisher.publish(version, model=trained)
            assert follower.update(model=live, timeout_secs=60) == version
            assert same(values(trained), values(live)) and live.head.weight is live.embed.weight
    assert [*tmp_path.glob(".ckpt-delta-2-*")]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    model = net(0, tied=True)
    ckpt.save(tmp_path / "a", model=model)
    leaves = {leaf.path: leaf for leaf in ckpt.inspect(tmp_path / "a").items["model"].leaves}
    assert "head.weight" not in leaves
    assert leaves["embed.weight"].bytes == 11 * 8 * 4
    assert leaves["_tied_weights/embed.weight/head.weight"].kind == "bool"
    other = net(1, tied=True)
    ckpt.restore(tmp_path / "a", model=other)
    assert other.head.weight is other.embed.weight
    assert same(values(model), values(other))


def test_an_untied_checkpoint_fills_a_tied_model_and_says_so(tmp_path):
    model = net(0)
    ckpt.save(tmp_path / "a", model=model)
    other = net(1, tied=True)
    with pytest.warns(UserWarning, match="were two with other values"):
        ckpt.restore(tmp_path / "a", model=other)
    assert other.head.weight.jax().tolist() == model.embed.weight.jax().tolist()

    model.head.weight._elem = jnp.array(model.embed.weight.jax())
    ckpt.save(tmp_path / "b", model=model)
    ckpt.restore(tmp_path / "b", model=other)  # equal: nothing to say
    assert other.head.weight is other.embed.weight


@pytest.mark.parametrize("plain", [False, True])
def test_a_part_of_a_tied_checkpoint(tmp_path, plain):
    """What `only=` leaves out stays, also where it was tied to what it takes, or not."""

    def make(seed: int, tied: bool = False) -> Any:
        torch.manual_seed(seed)
        return nets.Net(tied) if plain else net(seed, tied=tied)

    model, other = make(0, tied=True), make(1)
    ckpt.save(tmp_path / "a", model=model)
    before = values(other)
    ckpt.restore(tmp_path / "a", model=other, only="norm.*")
    assert values(other)["head.weight"].tolist() == before["head.weight"].tolist()
    unties = r"tied when saved.*tie them again after \.to\('jax'\), which unties them"
    with pytest.warns(UserWarning, match=unties):
        ckpt.restore(tmp_path / "a", model=other, only="embed.*")
    assert same(values(other), values(model))


def test_objects_that_were_made_before_see_the_new_values(tmp_path):
    model = net(0).eval()
    tokens, _ = nets.batch(0)
    ckpt.save(tmp_path / "a", model=model)
    other = net(1).eval()
    jitted = torchax.interop.JittableModule(other)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    objects = dict(other.named_parameters()) | dict(other.named_buffers())
    before = jitted(tokens).jax()
    ckpt.restore(tmp_path / "a", model=other)
    now = dict(other.named_parameters()) | dict(other.named_buffers())
    assert all(now[name] is objects[name] for name in objects)
    assert not np.allclose(jitted(tokens).jax(), before)
    wanted = torchax.interop.JittableModule(model)(tokens).jax()
    np.testing.assert_array_equal(jitted(tokens).jax(), wanted)
    weight = model.head.weight.jax()
    other.head.weight.grad = torch.ones_like(other.head.weight)
    optimizer.step()
    np.testing.assert_array_equal(other.head.weight.jax(), weight - 1)


def mismatch(target: nn.Module, path: Path) -> list[tuple[str, str]]:
    """What a restore complains about; and the module is as it was."""
    before = values(target)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(path, model=target)
    assert same(before, values(target))
    return [(entry.path, entry.kind) for entry in caught.value.mismatches]


def test_entries_that_one_side_lacks(tmp_path):
    """Of other shapes and dtypes: the suite of conformance."""
    ckpt.save(tmp_path / "a", model=net(0))
    more, fewer = net(1), net(1)
    more.extra = nn.Linear(2, 2, bias=False).to("jax")
    assert mismatch(more, tmp_path / "a") == [("extra.weight", "missing")]
    del fewer.norm
    assert ("norm.weight", "unexpected") in mismatch(fewer, tmp_path / "a")
    ckpt.restore(tmp_path / "a", model=fewer, unexpected="ignore")
    kept = np.array(more.extra.weight.jax())
    ckpt.restore(tmp_path / "a", model=more, missing="keep")
    np.testing.assert_array_equal(more.extra.weight.jax(), kept)


JAX_DTYPES = [
    *("bool_", "int4", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2"),
]


def test_every_dtype_of_jax_comes_back_bitwise(tmp_path):
    numbers = {name: [[0, 1, 2], [3, 2 if "u" in name else -2, 1]] for name in JAX_DTYPES}
    arrays = {name: jnp.asarray(of).astype(getattr(jnp, name)) for name, of in numbers.items()}
    ckpt.save(tmp_path / "a", {name: Holder(tensor(array)) for name, array in arrays.items()})
    fresh = {name: Holder(tensor(jnp.zeros_like(array))) for name, array in arrays.items()}
    ckpt.restore(tmp_path / "a", fresh)
    for name, array in arrays.items():
        assert fresh[name].x.jax().dtype == array.dtype
        assert np.asarray(fresh[name].x.jax()).tobytes() == np.asarray(array).tobytes(), name


@pytest.mark.filterwarnings("ignore:jax gives other numbers")
@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_64_bits_are_never_narrowed_in_silence(tmp_path, dtype):
    with jax.enable_x64(True):
        array = jnp.asarray([2**40], dtype)
        holder = Holder(tensor(array))
        ckpt.save(tmp_path / "a", model=holder)
        ckpt.restore(tmp_path / "a", model=Holder(tensor(array * 0)))
    narrow = Holder(tensor(jnp.zeros(1, jax.dtypes.canonicalize_dtype(dtype))))
    assert mismatch(narrow, tmp_path / "a") == [("x", "dtype")]
    if "int" in dtype:
        with pytest.raises(ckpt.StructureMismatch, match="1099511627776"):
            ckpt.restore(tmp_path / "a", model=narrow, cast=True)
    kept = ckpt.load(tmp_path / "a", as_numpy=True)["model"]["x"]
    assert (kept.dtype.name, kept[0]) == (dtype, 2**40)
    with pytest.raises(ckpt.CheckpointError, match="as_numpy=True"):
        ckpt.load(tmp_path / "a")


def test_a_view_is_set_through_its_parent(tmp_path):
    parent = tensor(jnp.arange(6.0).reshape(2, 3))
    holder = Holder(parent[0])
    assert type(holder.x).__name__ == "View"
    ckpt.save(tmp_path / "a", model=holder)
    other_parent = tensor(jnp.zeros((2, 3)))
    other = Holder(other_parent[0])
    ckpt.restore(tmp_path / "a", model=other)
    assert other.x.jax().tolist() == [0, 1, 2]
    assert other_parent.jax().tolist() == [[0, 1, 2], [0, 0, 0]]


def test_weights_may_be_donated_right_after_a_save(tmp_path):
    model = net(0)
    before = values(model)
    weights = dict(model.named_parameters())
    step = nets.jax_jit(
        lambda weights: {name: w + 1 for name, w in weights.items()},
        kwargs_for_jax_jit={"donate_argnums": (0,)},
    )
    pending = ckpt.save_async(tmp_path / "a", model=model)
    weights = step(weights)
    pending.result()
    assert model.head.weight.jax().is_deleted()
    saved = ckpt.load(tmp_path / "a", as_numpy=True)["model"]
    assert same({name: saved[name] for name in before}, before)
    ckpt.save(tmp_path / "b", model={**weights, **dict(model.named_buffers())}, overwrite=True)
    ckpt.restore(tmp_path / "a", model=model)  # a dead module can be filled again
    assert same(values(model), before)


def test_it_works_with_torchax_on_for_a_while_or_not_at_all(env, tmp_path):
    model = net(0)
    ckpt.save(tmp_path / "on", model=model)
    torchax.disable_globally()
    try:
        with env:
            ckpt.save(tmp_path / "with", model=model)
            other = net(1)
        ckpt.save(tmp_path / "off", model=model)
        for name in ("on", "with", "off"):
            ckpt.restore(tmp_path / name, model=other)
            assert same(values(model), values(other))
            other.head.weight._elem = other.head.weight.jax() * 0
    finally:
        torchax.enable_globally()


def test_wrapped_modules_have_the_names_of_the_bare_one(tmp_path):
    model = net(0)
    ckpt.save(tmp_path / "bare", model=model)
    names = [leaf.path for leaf in ckpt.inspect(tmp_path / "bare").items["model"].leaves]
    for label, wrapped in {
        "jittable": torchax.interop.JittableModule(model),
        "compiled": torchax.compile(model),
        "state_dict": model.state_dict(),
        "dict": {**dict(model.named_parameters()), **model.state_dict()},
    }.items():
        ckpt.save(tmp_path / label, model=wrapped)
        leaves = ckpt.inspect(tmp_path / label).items["model"].leaves
        assert sorted(leaf.path for leaf in leaves) == sorted(names), label
        other = net(1)
        ckpt.restore(tmp_path / label, model=torchax.interop.JittableModule(other))
        assert same(values(model), values(other))


def test_scanned_modules_come_back(tmp_path):
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("jax") for _ in range(3)]
        return torchax.train.ScannedModule(layers)

    model, other = make(0), make(1)
    ckpt.save(tmp_path / "a", model=model)
    ckpt.restore(tmp_path / "a", model=other)
    assert same(values(model), values(other))
    paths = {leaf.path for leaf in ckpt.inspect(tmp_path / "a").items["model"].leaves}
    assert "params.0___weight" in paths


def test_a_state_dict_comes_back_with_its_versions(tmp_path):
    state, target = net(0).state_dict(), net(1).state_dict()
    ckpt.save(tmp_path / "a", state)
    restored = ckpt.restore(tmp_path / "a", state=target)["state"]
    assert restored._metadata["norm"] == {"version": 2}
    for name, value in restored.items():
        assert value is target[name]
        np.testing.assert_array_equal(value.jax(), state[name].jax())


class WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.register_buffer("nothing", None)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_and_none_come_back(tmp_path):
    extra = {"seen": 3, "text": "ü", "none": None, "t": torch.arange(3), "pair": (1.5, [True])}
    model = nn.Sequential(WithExtra(extra)).to("jax")
    ckpt.save(tmp_path / "a", model=model)
    other = nn.Sequential(WithExtra({})).to("jax")
    ckpt.restore(tmp_path / "a", model=other)
    got = other[0].extra
    assert got["t"].tolist() == [0, 1, 2]
    assert {name: got[name] for name in extra if name != "t"} == {
        name: extra[name] for name in extra if name != "t"
    }
    assert other[0].nothing is None
