"""What a load or restore is given: load leaves it as it is, restore sets each object once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ckpt_core as ckpt
from ckpt_core.testing._prints import prints_of
from ckpt_flax_nnx import abstract
from tests.support import keras_models as km

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Model(nnx.Module):
    def __init__(self, value: float):
        self.w = nnx.Param(jnp.full((4, 3), value))
        self.reference = nnx.Variable(jnp.full(3, value), ref=True)
        self.bare = nnx.data(jnp.full(2, value))
        self.host = nnx.Variable(np.full(2, value))
        self.rngs = nnx.Rngs(int(value))
        self.activation = jax.nn.relu


def linear(value: float) -> nnx.Linear:
    made = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    made.kernel.set_value(jnp.full((3, 2), value))
    return made


class Counter:
    def __init__(self, value: float) -> None:
        self.numbers = np.full(3, value)

    def get_state(self) -> Any:
        return {"numbers": self.numbers}

    def set_state(self, state: Any) -> None:
        self.numbers[:] = state["numbers"]


def keras_model(value: float) -> Any:
    model = km.keras.Sequential([km.keras.Input((3,)), km.keras.layers.Dense(2)])
    for variable in model.weights:
        variable.assign(jnp.full(variable.shape, value))
    return model


def torch_model(value: float) -> Any:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


def tensor(value: float) -> Any:
    torch = pytest.importorskip("torch")
    return {"t": torch.full((3,), value), "w": jnp.full(2, value)}


def iterator(value: float) -> Any:
    made = iter(grain.MapDataset.range(50).to_iter_dataset())
    for _ in range(int(value)):
        next(made)
    return made


def with_optimizer(value: float) -> Any:
    model = linear(value)
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)}


COPIED: dict[str, Callable[[float], Any]] = {
    "module": Model,
    "state": lambda value: nnx.state(Model(value)),
    "variable": lambda value: nnx.Param(jnp.full(3, value)),
    "optimizer": with_optimizer,
    "container": lambda value: {"nets": [linear(value), linear(value + 1)], "n": value},
    "tensor": tensor,
}
REFUSED: dict[str, Callable[[float], Any]] = {
    "keras": keras_model,
    "stateful": Counter,
    "torch": torch_model,
    "grain": iterator,
}
METHODS: dict[str, Callable[..., Any]] = {
    "load": lambda path, like, **kw: ckpt.load(path, like, item="m", **kw),
    "composite": lambda path, like, **kw: ckpt.load(path, {"m": like}, **kw)["m"],
    "load_async": lambda path, like, **kw: ckpt.load_async(path, like, item="m", **kw).result(),
    "checkpointer": lambda path, like, **kw: _of_checkpointer(path, like, **kw),
}
methods = pytest.mark.parametrize("method", METHODS)


def _of_checkpointer(path: Path, like: Any, **arguments: Any) -> Any:
    with ckpt.Checkpointer(path.parent, read_only=True) as checkpointer:
        return checkpointer.load(int(path.name), like, item="m", **arguments)


@methods
@pytest.mark.parametrize("kind", COPIED)
def test_load_gives_a_copy_and_leaves_the_target(tmp_path, kind, method):
    make = COPIED[kind]
    saved, target = make(3.0), make(1.0)
    ckpt.save(tmp_path / "0", items={"m": saved})
    before, arrays = (
        prints_of(target),
        jax.tree.leaves(nnx.state(target)) if kind == "module" else [],
    )
    loaded = METHODS[method](tmp_path / "0", target)
    assert prints_of(target) == before
    assert arrays == [] or not any(
        array.is_deleted() for array in arrays if hasattr(array, "is_deleted")
    )
    assert type(loaded) is type(target) and loaded is not target
    assert prints_of(loaded) == prints_of(saved)


def test_the_copy_is_as_good_as_the_original(tmp_path):
    ckpt.save(tmp_path / "a", linear(3.0))
    target = linear(1.0)
    loaded = ckpt.load(tmp_path / "a", target)
    x = jnp.ones((1, 3))
    np.testing.assert_array_equal(loaded(x), linear(3.0)(x))
    np.testing.assert_array_equal(target(x), linear(1.0)(x))
    loaded.kernel.set_value(jnp.zeros((3, 2)))
    assert bool((target.kernel[...] == 1.0).all())


def test_what_the_originals_share_the_copies_share(tmp_path):
    def tied(value: float) -> dict[str, Any]:
        one, other = linear(value), linear(value + 1)
        other.kernel = one.kernel
        return {"one": one, "other": other, "again": one, "kernel": one.kernel}

    ckpt.save(tmp_path / "a", tied(3.0))
    target = tied(1.0)
    loaded = ckpt.load(tmp_path / "a", target)
    assert loaded["one"] is loaded["again"] is not target["one"]
    assert loaded["one"].kernel is loaded["other"].kernel is loaded["kernel"]
    assert loaded["one"].kernel is not target["one"].kernel
    assert bool((loaded["other"].kernel[...] == 3.0).all())
    assert bool((target["other"].kernel[...] == 1.0).all())


def test_a_kept_reference_of_the_copy_is_its_own(tmp_path):
    ckpt.save(tmp_path / "a", Model(3.0))
    target = Model(1.0)
    loaded = ckpt.load(tmp_path / "a", target, only="w")
    loaded.reference.get_raw_value()[...] = jnp.zeros(3)
    assert bool((target.reference.get_raw_value()[...] == 1.0).all())
    assert bool((loaded.w[...] == 3.0).all())


@methods
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_copied_is_refused_and_points_to_restore(tmp_path, kind, method):
    target = REFUSED[kind](1.0)
    ckpt.save(tmp_path / "0", m=REFUSED[kind](3.0))
    before = prints_of(target)
    with pytest.raises(
        ckpt.UnsupportedLeaf, match=r"load changes nothing.*restore\(path, "
    ) as caught:
        METHODS[method](tmp_path / "0", target)
    assert isinstance(caught.value, TypeError) and caught.value.type_name == type(target).__name__
    assert prints_of(target) == before
    restored = ckpt.restore(tmp_path / "0", m=target)["m"]
    assert restored is target and prints_of(target) != before


@pytest.mark.parametrize("kind", ["keras", "stateful", "torch"])
def test_in_a_container_it_is_named_by_its_path(tmp_path, kind):
    make = REFUSED[kind]
    ckpt.save(tmp_path / "a", {"w": jnp.ones(2), "deep": [make(3.0)]})
    target = {"w": jnp.zeros(2), "deep": [make(1.0)]}
    before = prints_of(target)
    with pytest.raises(ckpt.UnsupportedLeaf, match="deep/0: load changes nothing"):
        ckpt.load(tmp_path / "a", target)
    assert prints_of(target) == before


def test_an_asynchronous_load_looks_at_the_target_at_the_call(tmp_path):
    ckpt.save(tmp_path / "a", Model(3.0))
    target = Model(1.0)
    pending = ckpt.load_async(tmp_path / "a", target, only="w")
    target.bare = nnx.data(jnp.full(2, 9.0))
    assert bool((pending.result().bare == 1.0).all())


@pytest.mark.parametrize("kept", [False, True])
def test_an_abstract_model_is_a_target(tmp_path, kept):
    ckpt.save(tmp_path / "a", linear(3.0))
    wanted = abstract(lambda: linear(1.0))
    arguments: Any = {"missing": "keep"} if kept else {}
    loaded = ckpt.load(tmp_path / "a", wanted, **arguments)
    x = jnp.ones((1, 3))
    np.testing.assert_array_equal(loaded(x), linear(3.0)(x))
    ckpt.restore(tmp_path / "a", state=wanted)
    np.testing.assert_array_equal(wanted(x), linear(3.0)(x))


def twice(make: Callable[[float], Any]) -> dict[str, tuple[dict[str, Any], str]]:
    one = make(1.0)
    return {
        "two names": ({"a": one, "b": one}, "a and b are one"),
        "nested": ({"a": one, "b": {"x": one, "n": 1}}, "a and b/x are one"),
        "deeply": ({"a": {"y": [one]}, "b": {"x": one}}, "a/y/0 and b/x are one"),
    }


@pytest.mark.parametrize("place", ["two names", "nested", "deeply"])
@pytest.mark.parametrize("kind", ["module", "state", "variable", *REFUSED])
def test_one_live_object_under_two_names_is_refused(tmp_path, kind, place):
    if kind == "grain" and place != "two names":
        pytest.skip("an iterator is an item of its own")
    make = {**COPIED, **REFUSED}[kind]
    targets, message = twice(make)[place]
    first, second = twice(make)[place][0], twice(lambda value: make(value + 1))[place][0]
    ckpt.save(tmp_path / "a", a=first["a"], b=second["b"])
    for file in (tmp_path / "a").rglob("d/*"):
        file.write_bytes(bytes(file.stat().st_size))  # what is damaged cannot have been read
    before = prints_of(targets["a"])
    with pytest.raises(ckpt.UnsupportedLeaf, match=f"{message} and the same live "):
        ckpt.restore(tmp_path / "a", items=targets)
    assert prints_of(targets["a"]) == before


@pytest.mark.parametrize("make", [Counter, keras_model])
def test_one_object_twice_in_a_tree_is_refused(tmp_path, make):
    ckpt.save(tmp_path / "a", {"x": make(3.0), "y": [make(4.0)]})
    one = make(1.0)
    with pytest.raises(ckpt.UnsupportedLeaf, match="state/x and state/y/0 are one"):
        ckpt.restore(tmp_path / "a", state={"x": one, "y": [one]})


def test_ties_of_tensors_within_a_tree_are_none(tmp_path):
    torch = pytest.importorskip("torch")
    weight = torch.zeros(3)
    ckpt.save(tmp_path / "a", {"embed": torch.ones(3), "head": torch.ones(3)})
    ckpt.restore(tmp_path / "a", state={"embed": weight, "head": weight})
    assert torch.equal(weight, torch.ones(3))


def test_shared_immutable_targets_are_fine(tmp_path):
    array, sketch = jnp.zeros(2), {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    ckpt.save(
        tmp_path / "a",
        a=jnp.ones(2),
        b=jnp.full(2, 2.0),
        c={"w": jnp.ones(2)},
        d={"w": jnp.ones(2)},
    )
    restored = ckpt.restore(tmp_path / "a", a=array, b=array, c=sketch, d=sketch)
    assert restored["b"].tolist() == [2.0, 2.0] and restored["c"]["w"].tolist() == [1.0, 1.0]
    ckpt.save(tmp_path / "b", a=1, b=2)
    assert dict(ckpt.restore(tmp_path / "b", a=0, b=0)) == {"a": 1, "b": 2}


def test_a_load_into_one_model_under_two_names_gives_what_each_holds(tmp_path):
    ckpt.save(tmp_path / "a", a=linear(3.0), b=linear(4.0))
    one = linear(1.0)
    loaded = ckpt.load(tmp_path / "a", {"a": one, "b": one})
    values = [float(loaded[name].kernel[...][0, 0]) for name in "ab"]
    assert values == [3.0, 4.0] and float(one.kernel[...][0, 0]) == 1.0


UNSUPPORTED: dict[str, Any] = {
    "object": object(),
    "set": {1},
    "dates": np.array(["2026-01-01"], "datetime64[D]"),
    "function": len,
    "masked": np.ma.masked_array([1.0]),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_an_unsupported_leaf_of_a_target_is_not_said_to_be_saved(tmp_path, kind):
    ckpt.save(tmp_path / "a", {"x": 1})
    for call in (
        lambda: ckpt.load(tmp_path / "a", {"x": UNSUPPORTED[kind]}),
        lambda: ckpt.restore(tmp_path / "a", state={"x": UNSUPPORTED[kind]}),
    ):
        with pytest.raises(ckpt.UnsupportedLeaf, match=r"x: an? .* cannot be a target") as caught:
            call()
        assert "sav" not in str(caught.value).replace("was saved there", "")
        assert caught.value.leaf == "x"


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ckpt.StructureMismatch) as caught:
        call()
    return str(caught.value)


def test_what_was_given_is_not_advised(tmp_path):
    ckpt.save(tmp_path / "a", {"x": jnp.ones(2), "c": jnp.ones(1, jnp.complex64)})
    wanted = {"x": jnp.ones(2), "c": jnp.ones(1), "new": jax.ShapeDtypeStruct((2,), jnp.float32)}
    text = message_of(lambda: ckpt.load(tmp_path / "a", wanted))
    # of what is abstract nothing could be kept
    assert 'missing="keep"' not in text and "cast=True" in text
    made = {**wanted, "new": jnp.ones(2)}
    assert 'missing="keep"' in message_of(lambda: ckpt.load(tmp_path / "a", made))
    text = message_of(lambda: ckpt.load(tmp_path / "a", wanted, missing="keep", cast=True))
    assert 'missing="keep"' not in text and "cast=True" not in text
    assert "no value there that could be kept" in text
