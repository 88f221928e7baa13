"""Modules that hold functions in their fields: Equinox's, and any registered class of one's own."""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ckpt_core as ckpt
from tests.support.trees import Keyless, Moments, Plain, Registered


def keys(seed: int, count: int) -> Any:
    return jax.random.split(jax.random.key(seed), count)


class Convolutions(eqx.Module):
    """The network of Equinox's own first example: functions among the layers of a list."""

    layers: list[Any]

    def __init__(self, seed: int) -> None:
        one, two, three = keys(seed, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=one),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(3 * 4 * 4, 8, key=two),
            jax.nn.sigmoid,
            eqx.nn.Linear(8, 4, key=three),
            jax.nn.log_softmax,
        ]


class Trainer(eqx.Module):
    """A module with all kinds of callables in its fields."""

    weight: jax.Array
    optimizer: optax.GradientTransformation
    loss: Any
    reduce: Any
    table: dict[str, Any]
    scale: Any
    kind: type
    nothing: Any = None


def make_trainer(seed: int) -> Trainer:
    return Trainer(
        jax.random.normal(jax.random.key(seed), (3, 4)),
        optax.chain(optax.clip(1.0), optax.adam(1e-3)),
        optax.softmax_cross_entropy,
        functools.partial(jnp.sum, axis=0),
        {"add": jnp.add, "numpy": np.add, "builtin": math.sin, "jitted": jax.jit(math.sin)},
        lambda x: x * 2,
        jnp.bfloat16,
    )


def weight(seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (5,))


MODULES = {
    "MLP": lambda seed: eqx.nn.MLP(2, 3, 8, 2, key=jax.random.key(seed)),
    "Lambda in a Sequential": lambda seed: eqx.nn.Sequential(
        [eqx.nn.Linear(3, 3, key=jax.random.key(seed)), eqx.nn.Lambda(jax.nn.gelu)]
    ),
    "functions in a list": Convolutions,
    "attention": lambda seed: eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(seed)),
    "all callables": make_trainer,
    "PReLU and GRU": lambda seed: (
        eqx.nn.PReLU(0.25 * seed),
        eqx.nn.GRUCell(2, 3, key=jax.random.key(seed)),
    ),
    "filter_jit": lambda seed: eqx.filter_jit(eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(seed))),
    "no names of children": lambda seed: Keyless(weight(seed), jax.nn.relu),
    "registered dataclass": lambda seed: {"a": [Registered(weight(seed), jax.nn.relu)]},
    "in a module in a dict": lambda seed: {
        "model": eqx.nn.MLP(2, 3, 4, 1, activation=jax.nn.tanh, key=jax.random.key(seed)),
        "step": seed,
    },
}


def arrays(tree: Any) -> list[Any]:
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def functions(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if callable(leaf) and not eqx.is_array(leaf)]


@pytest.mark.parametrize("name", MODULES)
def test_functions_come_from_the_target_and_all_else_from_the_checkpoint(name, tmp_path):
    saved, other = MODULES[name](1), MODULES[name](2)
    ckpt.save(tmp_path / "one", saved)
    for found in (
        ckpt.load(tmp_path / "one", other),
        ckpt.restore(tmp_path / "one", state=other)["state"],
        ckpt.load(tmp_path / "one", jax.tree.map(lambda leaf: leaf, other)),
    ):
        assert jax.tree.structure(found) == jax.tree.structure(other)
        assert arrays(found) == arrays(saved) != arrays(other)
        assert all(a is b for a, b in zip(functions(found), functions(other), strict=True))
    assert ckpt.verify(tmp_path / "one").ok


@pytest.mark.parametrize("name", MODULES)
def test_without_a_target_the_error_says_what_to_pass(name, tmp_path):
    saved = MODULES[name](1)
    ckpt.save(tmp_path / "one", saved)
    if not functions(saved):
        assert ckpt.load(tmp_path / "one") is not None
        return
    with pytest.raises(ckpt.StructureMismatch, match="filter_eval_shape") as refused:
        ckpt.load(tmp_path / "one")
    assert len(refused.value.mismatches) == len(functions(saved))
    assert "is the function" in str(refused.value) and "load(path, model)" in str(refused.value)
    assert ckpt.load(tmp_path / "one", only="**") is not None  # as it says


def test_an_abstract_target(tmp_path):
    make = MODULES["MLP"]
    ckpt.save(tmp_path / "one", make(1))
    abstract = eqx.filter_eval_shape(make, 0)
    assert isinstance(abstract.layers[0].weight, jax.ShapeDtypeStruct)
    found = ckpt.load(tmp_path / "one", abstract)
    assert bool(eqx.tree_equal(found, make(1)))
    assert float(jnp.abs(found(jnp.ones(2)) - make(1)(jnp.ones(2))).max()) == 0.0


def make_with(activation: Any, seed: int = 0) -> Any:
    return eqx.nn.MLP(2, 3, 4, 1, activation=activation, key=jax.random.key(seed))


def test_functions_that_differ_are_named(tmp_path):
    ckpt.save(tmp_path / "one", model=make_with(jax.nn.relu), step=1)
    other = make_with(jnp.tanh, 1)
    with pytest.raises(ckpt.StructureMismatch) as refused:
        ckpt.restore(tmp_path / "one", model=other, step=0)
    (entry,) = refused.value.mismatches
    assert (entry.path, entry.kind, entry.item) == ("activation", "function", "model")
    assert entry.saved.endswith(":relu") and entry.wanted == "jax.numpy:tanh"
    assert "activation: function differs: saved jax." in str(refused.value)
    assert 'unexpected="ignore"' in str(refused.value)
    found = ckpt.restore(tmp_path / "one", model=other, step=0, unexpected="ignore")["model"]
    assert found.activation is other.activation
    assert arrays(found) == arrays(make_with(jax.nn.relu))


def test_a_partial_is_its_function(tmp_path):
    def leaky(slope: Any) -> Any:
        return make_with(functools.partial(jax.nn.leaky_relu, negative_slope=slope))

    ckpt.save(tmp_path / "one", leaky(0.1))
    for other in (leaky(jnp.ones(())), make_with(jax.nn.leaky_relu)):
        assert ckpt.load(tmp_path / "one", other).activation is other.activation


class MappingLike(dict[str, Any]):
    """A dictionary of a class of its own has keys, and no fields."""


jax.tree_util.register_pytree_with_keys(
    MappingLike,
    lambda d: ([(jax.tree_util.DictKey(k), d[k]) for k in sorted(d)], tuple(sorted(d))),
    lambda names, values: MappingLike(zip(names, values, strict=True)),
)


class Live:
    """What it is bound to has a state."""

    def method(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        ({"a": 1, "f": lambda x: x}, "<lambda>"),
        ({"f": jax.nn.relu}, ":relu"),
        ([jnp.sin], "jax.numpy:sin"),
        (Moments(1, jax.nn.relu), ":relu"),
        (Plain(1, jax.nn.relu), ":relu"),
        (optax.adam(1e-3), "init_fn"),
        (jax.nn.relu, ":relu"),
        ({"model": Registered(1, jax.nn.relu), "f": jax.nn.relu}, ":relu"),
        (MappingLike({"f": jax.nn.relu}), ":relu"),
        ({"f": functools.partial(jnp.sum, axis=0)}, ":sum"),
    ],
)
def test_functions_elsewhere_are_refused_by_name(tree, name, tmp_path):
    with pytest.raises(ckpt.UnsupportedLeaf) as refused:
        ckpt.save(tmp_path / "one", tree)
    assert name in str(refused.value) and "cannot save a" in str(refused.value)
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    "value",
    [Live().method, np.random.default_rng(0).normal, functools.partial(Live().method, 1), Live()],
)
def test_what_has_a_state_of_its_own_is_no_code(value, tmp_path):
    with pytest.raises(ckpt.UnsupportedLeaf, match="more: cannot save a"):
        ckpt.save(tmp_path / "one", Registered(1, value))


def test_orbax_sees_none_where_functions_are(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    make = MODULES["MLP"]
    with ckpt.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        checkpointer.save(3, make(1))
    with ocp.StandardCheckpointer() as theirs:
        found = theirs.restore(tmp_path / "run/3/state", eqx.filter(make(2), eqx.is_array))
    assert arrays(found) == arrays(make(1))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("jax._src.nn.functions:relu", "jax.nn:relu", True),
        ("__main__:act", "train:act", True),
        ("train:act", "model:act", False),
        ("jax.nn:relu", "jax.nn:gelu", False),
        ("jax.nn:relu", "torch.nn:relu", False),
        ("train:act(slope=0.1) of jax.nn:relu", "train:act", True),  # as 0.1 wrote it
    ],
)
def test_names_are_compared_by_package_and_name(one, other, same, tmp_path):
    def make(name: str) -> Registered:
        def function(x: Any) -> Any:
            return x

        function.__module__, _, function.__qualname__ = name.partition(":")
        return Registered(1, function)

    for saved, wanted in ((one, other), (other, one)):
        ckpt.save(tmp_path / "one", make(saved), overwrite=True)
        if same:
            ckpt.load(tmp_path / "one", make(wanted))
            continue
        with pytest.raises(ckpt.StructureMismatch, match="function differs"):
            ckpt.load(tmp_path / "one", make(wanted))
