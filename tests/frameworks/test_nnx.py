"""The Flax NNX adapter: live objects saved and restored in one call each."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from tests.support.paths import INTEGRATIONS

pytest.importorskip("flax")
pytest.importorskip("ckpt_flax_nnx")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ckpt_flax_nnx import ADAPTER, abstract, like_params, restore_or_init


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """XLA spends less time on programs that run a few times on a few numbers."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def host(value: Any) -> Any:
    """A leaf as something that compares bit for bit."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, (jax.Array, np.ndarray)):
        array = np.asarray(value)
        return (array.dtype.name, array.shape, array.tobytes())
    return (type(value), value)


def same(left: Any, right: Any) -> bool:
    """Whether two states have the same structure, types and bits."""
    leaves, structure = jax.tree.flatten(left)
    others, other_structure = jax.tree.flatten(right)
    return structure == other_structure and list(map(host, leaves)) == list(map(host, others))


def state_of(obj: Any) -> Any:
    """A copy of everything that a live object holds."""
    return jax.tree.map(lambda x: x.copy() if hasattr(x, "copy") else x, ADAPTER.get_state(obj))


class MLP(nnx.Module):
    def __init__(self, seed: int = 0, *, width: int = 8, layers: int = 2):
        rngs = nnx.Rngs(seed, dropout=seed + 1)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.out(self.dropout(self.norm(x)))


class Holder(nnx.Module):
    """A module with the attributes that it is given."""

    def __init__(self, **attributes: Any):
        for name, value in attributes.items():
            setattr(self, name, value)


@nnx.jit
def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


# ---------------------------------------------------------------------------- modules and paths


def test_model_comes_back_into_live_and_merged_objects(tmp_path: Path) -> None:
    model = MLP(0)
    saved = state_of(model)
    ckpt.save(tmp_path / "a", model=model)
    live, merged = MLP(1), nnx.merge(*nnx.split(MLP(2)))
    kernel = live.out.kernel
    restored = ckpt.restore(tmp_path / "a", model=live)
    ckpt.restore(tmp_path / "a", model=merged)
    assert same(state_of(live), saved)
    assert same(state_of(merged), saved)
    assert live.out.kernel is kernel
    assert restored["model"] is live


def test_one_object_without_a_name(tmp_path: Path) -> None:
    model, other = MLP(0), MLP(1)
    ckpt.save(tmp_path / "a", model)
    ckpt.restore(tmp_path / "a", state=other)
    assert same(state_of(other), state_of(model))


def test_without_a_target_lists_have_int_keys(tmp_path: Path) -> None:
    model = MLP(0)
    ckpt.save(tmp_path / "a", model=model)
    loaded = ckpt.load(tmp_path / "a")["model"]
    assert list(loaded["layers"]) == [0, 1]
    assert same(loaded, state_of(model))


def test_text_digits_and_positions_stay_apart(tmp_path: Path) -> None:
    def make(value: float) -> Holder:
        return Holder(
            named=nnx.Dict({"0": nnx.Param(jnp.full(2, value)), "1": nnx.Param(jnp.ones(1))}),
            listed=nnx.List([nnx.Param(jnp.full(3, value))]),
            plain=nnx.data({0: jnp.full(1, value), 10: jnp.ones(2), 2: jnp.ones(3)}),
        )

    model, other = make(1.0), make(2.0)
    ckpt.save(tmp_path / "a", model=model)
    loaded = ckpt.load(tmp_path / "a")["model"]
    assert set(loaded["named"]) == {"0", "1"}
    assert set(loaded["listed"]) == {0}
    assert set(loaded["plain"]) == {0, 2, 10}
    ckpt.restore(tmp_path / "a", model=other)
    assert same(state_of(other), state_of(model))


def test_keys_with_slashes(tmp_path: Path) -> None:
    def make(value: float) -> nnx.Dict[Any]:
        inner = nnx.Dict({"b": nnx.Param(jnp.full(2, value))})
        return nnx.Dict({"a/b": nnx.Param(jnp.full(2, value + 1)), "a": inner, "ü ~": inner["b"]})

    model, other = make(1.0), make(5.0)
    ckpt.save(tmp_path / "a", model=model)
    ckpt.restore(tmp_path / "a", model=other)
    assert same(state_of(other), state_of(model))


def test_keys_that_orbax_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    model = nnx.Dict({"a.b": nnx.Param(jnp.ones(2)), "a": nnx.Dict({"b": nnx.Param(jnp.ones(2))})})
    with pytest.raises(ckpt.CheckpointError, match=r"a\.b.*a/b|a/b.*a\.b"):
        ckpt.save(tmp_path / "a", model=model)
    assert list(tmp_path.iterdir()) == []


def test_a_module_without_state(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", model=Holder(name="x"), more=MLP(0))
    ckpt.restore(tmp_path / "a", model=Holder(name="y"), more=MLP(1))


def test_zero_size_and_odd_dtypes(tmp_path: Path) -> None:
    def make(value: int) -> Holder:
        dtypes = (
            ml_dtypes.bfloat16,
            ml_dtypes.int4,
            ml_dtypes.float8_e4m3fn,
            np.complex64,
            np.bool_,
        )
        arrays = [nnx.Param(jnp.full((3,), value, dtype)) for dtype in dtypes]
        return Holder(empty=nnx.Param(jnp.zeros((0, 3))), arrays=nnx.List(arrays))

    model, other = make(1), make(0)
    ckpt.save(tmp_path / "a", model=model)
    ckpt.restore(tmp_path / "a", model=other)
    assert same(state_of(other), state_of(model))


def test_every_sort_of_leaf_is_set_where_it_lives(tmp_path: Path) -> None:
    def make(k: float) -> Holder:
        return Holder(
            scalar=nnx.Variable(3.0 + k),
            nothing=nnx.Variable(None),
            several=nnx.Variable([jnp.full(1, k), jnp.full(2, k)]),
            array=nnx.data(jnp.full(2, k)),
            numpy=nnx.data(np.arange(3) + int(k)),
            in_tuple=nnx.data((jnp.full(1, k), {"x": np.full(2, k)})),
            reference=nnx.Param(jnp.full(2, k), ref=True),
            hijax=nnx.Param(jnp.full(2, k), hijax=True),
            both=nnx.Param(jnp.full(2, k), ref=True, hijax=True),
            bare_reference=nnx.data(jax.new_ref(jnp.full(2, k))),
        )

    model, other = make(1.0), make(7.0)
    reference = other.reference.get_raw_value()
    ckpt.save(tmp_path / "a", model=model)
    ckpt.restore(tmp_path / "a", model=other)
    assert same(state_of(other), state_of(model))
    assert type(other.numpy) is np.ndarray
    assert type(other.in_tuple) is tuple
    assert other.scalar.get_value() == 4.0
    assert other.reference.get_raw_value() is reference
    assert np.array_equal(reference[...], [1.0, 1.0])
    assert np.array_equal(other.hijax.get_value(), [1.0, 1.0])


def test_a_bare_variable_and_a_state_are_targets_too(tmp_path: Path) -> None:
    model, other = MLP(0), MLP(1)
    ckpt.save(tmp_path / "a", kernel=model.out.kernel, params=nnx.state(model, nnx.Param))
    ckpt.restore(tmp_path / "a", kernel=other.out.kernel, params=nnx.state(other, nnx.Param))
    assert same(state_of(nnx.state(other, nnx.Param)), state_of(nnx.state(model, nnx.Param)))
    assert not same(state_of(other.dropout), state_of(model.dropout))


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    def make(seed: int, *, tied: bool = True) -> Holder:
        rngs = nnx.Rngs(seed)
        model = Holder(emb=nnx.Embed(4, 4, rngs=rngs), head=nnx.Linear(4, 4, rngs=rngs))
        if tied:
            model.head.kernel = model.emb.embedding
        return model

    model, other = make(0), make(1)
    ckpt.save(tmp_path / "a", model=model)
    leaves = ckpt.inspect(tmp_path / "a").items["model"].leaves
    assert sorted(leaf.path for leaf in leaves) == ["emb/embedding", "head/bias"]
    ckpt.restore(tmp_path / "a", model=other)
    assert other.head.kernel is other.emb.embedding
    assert same(state_of(other), state_of(model))
    # Code that no longer ties asks for a weight that was not stored, and is told which.
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", model=make(2, tied=False))
    assert [(m.kind, m.path) for m in caught.value.mismatches] == [("missing", "head/kernel")]


def tied(seed: int, *, tie: bool = True) -> Holder:
    rngs = nnx.Rngs(seed)
    model = Holder(emb=nnx.Embed(4, 4, rngs=rngs), head=nnx.Linear(4, 4, rngs=rngs))
    if tie:
        model.head.kernel = model.emb.embedding
    return model


def test_a_tied_checkpoint_in_code_that_does_not_tie(tmp_path: Path) -> None:
    saved, live = tied(0), tied(1, tie=False)
    ckpt.save(tmp_path / "a", model=saved)
    restored = ckpt.restore(tmp_path / "a", model=live, missing="keep")
    assert restored.report.missing == ("model/head/kernel",)
    live.head.kernel.set_value(live.emb.embedding.get_value())
    assert live.head.kernel is not live.emb.embedding
    assert same(live.head.kernel.get_value(), saved.head.kernel.get_value())
    assert same(live.emb.embedding.get_value(), saved.emb.embedding.get_value())


def test_an_untied_checkpoint_in_code_that_ties(tmp_path: Path) -> None:
    saved = tied(0, tie=False)
    ckpt.save(tmp_path / "a", model=saved)
    live = tied(1)
    before = state_of(live)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", model=live)
    assert [(m.kind, m.path) for m in caught.value.mismatches] == [("unexpected", "head/kernel")]
    assert same(state_of(live), before)
    ckpt.restore(tmp_path / "a", model=live, unexpected="ignore")
    assert live.head.kernel is live.emb.embedding
    assert same(live.emb.embedding.get_value(), saved.emb.embedding.get_value())
    # The other of the two is taken by its name.
    rename = {"emb/embedding": "not/wanted", "head/kernel": "emb/embedding"}
    ckpt.restore(tmp_path / "a", model=live, unexpected="ignore", rename=rename)
    assert same(live.head.kernel.get_value(), saved.head.kernel.get_value())


@pytest.mark.parametrize(
    "container", [tuple, list, lambda pair: dict(zip("ba", pair, strict=True))]
)
def test_variables_shared_between_modules_of_a_container(container: Any, tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        pair = [nnx.Linear(4, 4, rngs=nnx.Rngs(seed + i)) for i in range(2)]
        pair[1].kernel = pair[0].kernel
        return container(pair)

    saved, live = make(0), make(7)
    ckpt.save(tmp_path / "a", saved)
    leaves = ckpt.inspect(tmp_path / "a").items["state"].leaves
    assert [leaf.path.rpartition("/")[2] for leaf in leaves] == ["bias", "kernel", "bias"]
    ckpt.restore(tmp_path / "a", state=live)
    first, second = live.values() if isinstance(live, dict) else live
    assert first.kernel is second.kernel
    for new, old in zip(jax.tree.leaves(live), jax.tree.leaves(saved), strict=True):
        assert host(new) == host(old)
    # The next tree starts anew: sharing is found each time.
    ckpt.save(tmp_path / "again", saved)
    assert ckpt.inspect(tmp_path / "again").items["state"].leaves == leaves


def test_shared_variables_of_an_abstract_pair(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        first, second = (nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2))
        second.kernel = first.kernel
        return first, second

    saved, live = make(), abstract(make)
    ckpt.save(tmp_path / "a", saved)
    ckpt.restore(tmp_path / "a", state=live)
    assert live[1].kernel is live[0].kernel
    assert same(live[1].kernel.get_value(), saved[0].kernel.get_value())


def test_models_in_containers(tmp_path: Path) -> None:
    made = {"pair": (MLP(0), MLP(1)), "list": [MLP(2)], "step": 3}
    other = {"pair": (MLP(5), MLP(6)), "list": [MLP(7)], "step": 0}
    ckpt.save(tmp_path / "a", made)
    restored = ckpt.restore(tmp_path / "a", state=other)
    for new, old in zip(
        (*other["pair"], *other["list"]), (*made["pair"], *made["list"]), strict=True
    ):
        assert same(state_of(new), state_of(old))
    assert restored["state"]["step"] == 3


def test_in_a_new_process(tmp_path: Path, run_python: Any) -> None:
    model = MLP(0)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = []
    for step in range(4):
        if step == 2:
            ckpt.save(tmp_path / "a", model=model, optimizer=optimizer)
        losses.append(float(train_step(model, optimizer, X)))
    source = "\n".join(
        [
            "import json, sys, numpy as np, jax.numpy as jnp, optax, ckpt_core as ckpt",
            "from typing import Any",
            "from flax import nnx",
            inspect.getsource(MLP),
            inspect.getsource(train_step),
            "X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)",
            "model = MLP(9)",
            "optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)",
            "ckpt.restore(sys.argv[1], model=model, optimizer=optimizer)",
            "print(json.dumps([float(train_step(model, optimizer, X)) for _ in range(2)]))",
        ]
    )
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as here: the same program, the same bits
    assert run_python(source, str(tmp_path / "a"), **quick) == losses[2:]


# --------------------------------------------------------------------------- optimizers and rngs


OPTIMIZERS = {
    "chain, masked": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.adamw(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    ),
    "adam": lambda: optax.adam(1e-2),
    "sgd": lambda: optax.sgd(1e-2),
    "partition": lambda: optax.partition(
        {2: optax.adam(1e-2), 10: optax.sgd(1e-2, momentum=0.9)},
        lambda p: jax.tree.map(lambda x: 2 if x.ndim > 1 else 10, p),
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 3).gradient_transformation(),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 1e-3, 10)),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "chain, masked" else pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_training_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    tx = OPTIMIZERS[name]()  # one for both models, so that the step is compiled once

    def make(seed: int) -> tuple[MLP, nnx.Optimizer[MLP]]:
        model = MLP(seed)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    model, optimizer = make(0)
    for _ in range(2):
        train_step(model, optimizer, X)
    ckpt.save(tmp_path / "a", model=model, optimizer=optimizer)
    other_model, other_optimizer = make(1)
    kinds = jax.tree.structure(other_optimizer.opt_state)
    ckpt.restore(tmp_path / "a", model=other_model, optimizer=other_optimizer)
    assert jax.tree.structure(other_optimizer.opt_state) == kinds
    assert other_optimizer.step.get_value() == 2
    for _ in range(2):
        expected = train_step(model, optimizer, X)
        assert host(train_step(other_model, other_optimizer, X)) == host(expected)
    assert same(state_of((other_model, other_optimizer)), state_of((model, optimizer)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flax will drop it
def test_model_and_optimizer_in_one(tmp_path: Path) -> None:
    made = nnx.ModelAndOptimizer(MLP(0), optax.adam(1e-2))
    other = nnx.ModelAndOptimizer(MLP(1), optax.adam(1e-2))
    ckpt.save(tmp_path / "a", both=made)
    ckpt.restore(tmp_path / "a", both=other)
    assert same(state_of(other), state_of(made))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_streams(impl: str, tmp_path: Path) -> None:
    def make(seed: int) -> nnx.Rngs:
        return nnx.Rngs(seed, dropout=jax.random.key(seed, impl=impl))

    rngs, other = make(0), make(1)
    rngs.dropout(), rngs.params()
    ckpt.save(tmp_path / "a", rngs=rngs)
    ckpt.restore(tmp_path / "a", rngs=other)
    assert host(other.dropout()) == host(rngs.dropout())
    assert host(other.params()) == host(rngs.params())
    assert jax.random.key_impl(other.dropout.key.get_value()) == impl


def test_keys_of_another_implementation_are_refused(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", rngs=nnx.Rngs(params=jax.random.key(0, impl="rbg")))
    with pytest.raises(ckpt.StructureMismatch, match="params/key") as caught:
        ckpt.restore(tmp_path / "a", rngs=nnx.Rngs(params=jax.random.key(0)))
    assert "rbg" in str(caught.value)


def test_stacked_layers_with_key_arrays(tmp_path: Path) -> None:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def make(seed: int) -> Block:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def build(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        return build(nnx.Rngs(seed))

    model, other = make(0), make(1)
    assert model.dropout.rngs is not None
    ckpt.save(tmp_path / "a", model=model)
    ckpt.restore(tmp_path / "a", model=other)
    assert model.linear.kernel.shape == (3, 4, 4)
    assert same(state_of(other), state_of(model))


def test_sharded_keys(tmp_path: Path, mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, P(("data", "model")))

    def make(seed: int) -> Holder:
        return Holder(
            keys=nnx.Variable(jax.device_put(jax.random.split(jax.random.key(seed), 8), sharding))
        )

    model, other = make(0), make(1)
    ckpt.save(tmp_path / "a", model=model)
    ckpt.restore(tmp_path / "a", model=other)
    assert same(state_of(other), state_of(model))
    assert other.keys.get_value().sharding.is_equivalent_to(sharding, 1)


def test_metrics_and_averages(tmp_path: Path) -> None:
    def make() -> nnx.MultiMetric:
        return nnx.MultiMetric(
            accuracy=nnx.metrics.Accuracy(),
            loss=nnx.metrics.Average(),
            spread=nnx.metrics.Welford(),
        )

    metrics, other = make(), make()
    logits, labels = jnp.eye(3), jnp.array([0, 1, 1])
    metrics.update(logits=logits, labels=labels, values=jnp.array([1.0, 2.0, 4.0]))
    ckpt.save(tmp_path / "a", metrics_state=metrics)
    ckpt.restore(tmp_path / "a", metrics_state=other)
    assert same(jax.tree.leaves(other.compute()), jax.tree.leaves(metrics.compute()))


# --------------------------------------------------------------------------------- what is stored


def test_batch_statistics(tmp_path: Path) -> None:
    model, other = MLP(0), MLP(1)
    model(X + 3)
    ckpt.save(tmp_path / "a", model=model)
    ckpt.restore(tmp_path / "a", model=other)
    assert float(jnp.abs(other.norm.mean.get_value()).sum()) > 0
    assert same(state_of(other.norm), state_of(model.norm))


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
def test_raw_values_are_stored_not_what_hooks_make_of_them(tmp_path: Path) -> None:
    def make(value: float) -> Holder:
        return Holder(
            w=nnx.Param(
                jnp.full(2, value),
                on_get_value=lambda _, x: x * 10,
                on_set_value=lambda _, x: x * 100,
            )
        )

    model, other = make(1.0), make(5.0)
    ckpt.save(tmp_path / "a", model=model)
    ckpt.restore(tmp_path / "a", model=other)
    assert np.array_equal(other.w.get_raw_value(), [1.0, 1.0])
    assert np.array_equal(other.w.get_value(), [10.0, 10.0])


def test_live_metadata_stays(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", model=Holder(w=nnx.Param(jnp.ones(2), tag="saved")))
    live = Holder(w=nnx.Param(jnp.zeros(2), tag="live", extra=np.ones(2)))
    ckpt.restore(tmp_path / "a", model=live)
    assert live.w.get_metadata("tag") == "live"
    assert "extra" in live.w.get_metadata()
    assert np.array_equal(live.w.get_value(), [1.0, 1.0])


def test_caches_are_state_and_intermediates_are_not(tmp_path: Path) -> None:
    def make(seed: int) -> Holder:
        return Holder(
            attention=nnx.MultiHeadAttention(
                num_heads=2, in_features=4, decode=True, rngs=nnx.Rngs(seed)
            )
        )

    model, fresh = make(0), make(1)
    model.attention.init_cache((1, 6, 4))
    model.seen = nnx.Intermediate((jnp.ones(3),))  # what model.sow leaves behind
    ckpt.save(tmp_path / "a", model=model)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", model=fresh)
    assert {m.kind for m in caught.value.mismatches} == {"unexpected"}
    assert all("cache" in m.path for m in caught.value.mismatches)
    fresh.attention.init_cache((1, 6, 4))
    ckpt.restore(tmp_path / "a", model=fresh)
    assert same(state_of(fresh), state_of(model))


def test_what_was_saved_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    model = MLP(0)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    buffer = Holder(numpy=nnx.data(np.zeros(1000, np.float32)))
    saved = state_of((model, optimizer, buffer))
    pending = ckpt.save_async(tmp_path / "a", model=model, optimizer=optimizer, buffer=buffer)
    nnx.jit(train_step, donate_argnums=(0, 1))(model, optimizer, X)
    model.out.bias[...] = jnp.full(8, 9.0)
    buffer.numpy[:] = 7
    pending.result()
    other = MLP(1)
    other_optimizer = nnx.Optimizer(other, optax.adam(1e-2), wrt=nnx.Param)
    ckpt.restore(tmp_path / "a", model=other, optimizer=other_optimizer, buffer=buffer)
    assert same(state_of((other, other_optimizer, buffer)), saved)


# --------------------------------------------------------------------------------- what is refused


def test_wrong_shape_and_dtype_change_nothing(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", model=MLP(0))
    wider = MLP(1, width=16)
    wider.norm.scale.set_value(wider.norm.scale.get_value().astype(jnp.bfloat16))
    before = state_of(wider)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", model=wider)
    found = {(m.path, m.kind) for m in caught.value.mismatches}
    assert found == {("out/kernel", "shape"), ("out/bias", "shape"), ("norm/scale", "dtype")}
    for text in ("out/kernel", "4,8", "4,16", "float32", "bfloat16"):
        assert text in str(caught.value)
    assert same(state_of(wider), before)


def test_missing_and_extra_leaves_are_listed_and_can_be_kept(tmp_path: Path) -> None:
    model = MLP(0)
    ckpt.save(tmp_path / "a", model=model)
    other = MLP(1, layers=3)
    other.norm = None
    before = state_of(other.layers[2])
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", model=other)
    kinds = {
        kind: {m.path for m in caught.value.mismatches if m.kind == kind}
        for kind in ("missing", "unexpected")
    }
    assert kinds["missing"] == {"layers/2/kernel", "layers/2/bias"}
    assert kinds["unexpected"] == {f"norm/{name}" for name in ("bias", "mean", "scale", "var")}
    restored = ckpt.restore(tmp_path / "a", model=other, missing="keep", unexpected="ignore")
    assert same(state_of(other.layers[2]), before)
    assert same(state_of(other.layers[1]), state_of(model.layers[1]))
    assert len(restored.report.missing) == 2
    assert len(restored.report.unexpected) == 4


def test_only_the_parameters(tmp_path: Path) -> None:
    model, other = MLP(0), MLP(1)
    model(X + 3)
    ckpt.save(tmp_path / "a", model=model)
    before = state_of(nnx.state(other, nnx.Not(nnx.Param)))
    restored = ckpt.restore(tmp_path / "a", model=other, only=nnx.Param)
    assert same(state_of(nnx.state(other, nnx.Param)), state_of(nnx.state(model, nnx.Param)))
    assert same(state_of(nnx.state(other, nnx.Not(nnx.Param))), before)
    assert "model/norm/scale" in restored.report.loaded
    assert "model/norm/mean" not in restored.report.loaded


@pytest.mark.parametrize(
    ("only", "loaded"),
    [
        (nnx.BatchStat, {"norm/mean", "norm/var"}),
        (nnx.Any(nnx.BatchStat, nnx.PathContains("bias")), {"norm/mean", "norm/var", "norm/bias"}),
        (nnx.All(nnx.Param, nnx.PathContains("norm")), {"norm/scale", "norm/bias"}),
        (nnx.Not(nnx.Param), {"norm/mean", "dropout/rngs/key"}),
    ],
)
def test_filters_of_nnx(only: Any, loaded: set[str], tmp_path: Path) -> None:
    model, other = MLP(0), MLP(1)
    ckpt.save(tmp_path / "a", model=model)
    restored = ckpt.restore(tmp_path / "a", model=other, only=only)
    found = {path.removeprefix("model/") for path in restored.report.loaded}
    assert loaded <= found
    assert ("out/kernel" in found) is False
    expected = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, only))}
    assert found == expected


def test_a_filter_with_an_optimizer_beside(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        model = MLP(seed)
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1.0), wrt=nnx.Param)}

    saved, live = make(0), make(1)
    train_step(saved["model"], saved["optimizer"], X)
    ckpt.save(tmp_path / "a", **saved)
    before = state_of(live["optimizer"])
    ckpt.restore(tmp_path / "a", **live, only=nnx.Param)
    assert same(state_of(live["optimizer"]), before)
    params = [nnx.state(each["model"], nnx.Param) for each in (live, saved)]
    assert same(*map(state_of, params))


def test_renamed_attributes(tmp_path: Path) -> None:
    class Renamed(MLP):
        def __init__(self, seed: int):
            super().__init__(seed)
            self.blocks, self.layers = self.layers, None

    saved, live = MLP(0), Renamed(1)
    ckpt.save(tmp_path / "a", model=saved)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", model=live)
    nearest = {m.path: m.nearest for m in caught.value.mismatches if m.kind == "missing"}
    assert nearest["blocks/0/kernel"] == "layers/0/kernel"
    ckpt.restore(tmp_path / "a", model=live, rename={"layers": "blocks"})
    assert same(state_of(live.blocks), state_of(saved.layers))


def test_a_cast_is_told(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", model=nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    live = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
    restored = ckpt.restore(tmp_path / "a", model=live, cast=True)
    assert set(restored.report.cast) == {"model/kernel", "model/bias"}
    assert live.kernel.get_value().dtype == jnp.bfloat16


def test_lora_added_after_the_save(tmp_path: Path) -> None:
    base = Holder(linear=nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    ckpt.save(tmp_path / "base", model=base)
    tuned = Holder(linear=nnx.LoRALinear(4, 4, lora_rank=2, rngs=nnx.Rngs(1)))
    with pytest.raises(ckpt.StructureMismatch, match="lora_a"):
        ckpt.restore(tmp_path / "base", model=tuned)
    restored = ckpt.restore(tmp_path / "base", model=tuned, missing="keep")
    assert {path.rpartition("/")[2] for path in restored.report.missing} == {"lora_a", "lora_b"}
    assert host(tuned.linear.kernel.get_value()) == host(base.linear.kernel.get_value())
    optimizer = nnx.Optimizer(tuned, optax.adam(1e-2), wrt=nnx.LoRAParam)
    ckpt.save(tmp_path / "tuned", model=tuned, optimizer=optimizer)
    again = Holder(linear=nnx.LoRALinear(4, 4, lora_rank=2, rngs=nnx.Rngs(2)))
    other = nnx.Optimizer(again, optax.adam(1e-2), wrt=nnx.LoRAParam)
    ckpt.restore(tmp_path / "tuned", model=again, optimizer=other)
    assert same(state_of(again), state_of(tuned))


# ----------------------------------------------------------------------------------------- meshes


def make_mesh(shape: tuple[int, ...], axis_type: Any = AxisType.Auto) -> Mesh:
    names = ("data", "model")[-len(shape) :]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


class Annotated(nnx.Module):
    def __init__(self, seed: int, **metadata: Any):
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(
            8, 16, rngs=rngs, kernel_metadata={"out_sharding": (None, "model"), **metadata}
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.data(jnp.ones(3))

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


def build(seed: int) -> dict[str, Any]:
    model = Annotated(seed)
    return {
        "model": model,
        "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param),
    }


@pytest.mark.parametrize(
    ("shape", "axis_type"),
    [
        ((4, 2), AxisType.Auto),
        pytest.param((1,), AxisType.Explicit, marks=pytest.mark.slow),
        pytest.param((4, 2), AxisType.Explicit, marks=pytest.mark.slow),
        pytest.param((8,), AxisType.Auto, marks=pytest.mark.slow),
        pytest.param((8,), AxisType.Explicit, marks=pytest.mark.slow),
        pytest.param((1,), AxisType.Auto, marks=pytest.mark.slow),
    ],
)
def test_onto_another_mesh(shape: tuple[int, ...], axis_type: Any, tmp_path: Path) -> None:
    with jax.set_mesh(make_mesh((2, 4), axis_type)):
        made = build(0)
    ckpt.save(tmp_path / "a", **made)
    with jax.set_mesh(make_mesh(shape, axis_type)):
        live = build(1)
    sharding = live["model"].linear.kernel.get_value().sharding
    ckpt.restore(tmp_path / "a", **live)
    assert same(state_of(live), state_of(made))
    assert live["model"].linear.kernel.get_value().sharding == sharding


@pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)]
)
def test_into_an_abstract_model(axis_type: Any, tmp_path: Path) -> None:
    with jax.set_mesh(make_mesh((2, 4), axis_type)):
        made = build(0)
    ckpt.save(tmp_path / "a", **made)
    mesh = make_mesh((4, 2), axis_type)
    target = abstract(lambda: build(1), mesh)
    assert isinstance(target["model"].linear.kernel.get_value(), jax.ShapeDtypeStruct)
    ckpt.restore(tmp_path / "a", **target)
    assert same(state_of(target), state_of(made))
    for leaf in jax.tree.leaves(state_of(target)):
        assert set(leaf.sharding.device_set) == set(mesh.devices.flat)
    moment = target["optimizer"].opt_state[0].mu["linear"]["kernel"].get_value()
    for kernel in (target["model"].linear.kernel.get_value(), moment):
        assert kernel.sharding.spec == P(None, "model")
    with jax.set_mesh(mesh):
        nnx.jit(lambda m, x: m(x))(target["model"], jnp.ones((4, 8)))


def test_random_streams_on_an_explicit_mesh_of_one_device(tmp_path: Path) -> None:
    # There jax gives scalar keys a partition spec of one entry, which it then refuses itself.
    with jax.set_mesh(make_mesh((1,), AxisType.Explicit)):
        rngs, other = nnx.Rngs(0), nnx.Rngs(1)
    ckpt.save(tmp_path / "a", rngs=rngs)
    ckpt.restore(tmp_path / "a", rngs=other)
    assert same(state_of(other), state_of(rngs))


def test_into_what_eval_shape_gives_inside_a_mesh(tmp_path: Path) -> None:
    mesh = make_mesh((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        made = Annotated(0)
        ckpt.save(tmp_path / "a", model=made)
        target = nnx.eval_shape(lambda: Annotated(1))
        ckpt.restore(tmp_path / "a", model=target)
    assert same(state_of(target), state_of(made))
    assert target.linear.kernel.get_value().sharding == NamedSharding(mesh, P(None, "model"))


def test_eval_shape_outside_its_mesh_says_what_to_do(tmp_path: Path) -> None:
    with jax.set_mesh(make_mesh((4, 2), AxisType.Explicit)):
        ckpt.save(tmp_path / "a", model=Annotated(0))
        target = nnx.eval_shape(lambda: Annotated(1))
    with pytest.raises(ValueError, match="set_mesh"):
        ckpt.restore(tmp_path / "a", model=target)


def test_annotations_by_logical_names_and_own_mesh() -> None:
    mesh = make_mesh((4, 2))
    rules = (("wide", "model"),)

    def make() -> nnx.Linear:
        metadata = {"out_sharding": (None, "wide"), "sharding_rules": rules, "mesh": mesh}
        return nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_metadata=metadata)

    target = abstract(make, mesh)
    assert target.kernel.get_value().sharding == NamedSharding(mesh, P(None, "model"))


def test_an_annotated_model_without_a_mesh_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"jax\.set_mesh"):
        abstract(lambda: Annotated(0))


def test_uncommitted_leaves_do_not_break_a_sharded_step(tmp_path: Path, mesh: Mesh) -> None:
    def make(seed: int) -> tuple[Any, Any]:
        model = nnx.Linear(8, 16, rngs=nnx.Rngs(seed))
        for variable in (model.kernel, model.bias):
            variable.set_value(jax.device_put(variable.get_value(), NamedSharding(mesh, P())))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    model, optimizer = make(0)
    ckpt.save(tmp_path / "a", model=model, optimizer=optimizer)
    other = make(1)
    committed = {k: v.committed for k, v in _arrays(other)}
    assert not all(committed.values())
    ckpt.restore(tmp_path / "a", model=other[0], optimizer=other[1])
    assert {k: v.committed for k, v in _arrays(other)} == committed
    assert np.isfinite(
        train_step(*other, jax.device_put(np.ones((4, 8)), NamedSharding(mesh, P("data"))))
    )


def test_slots_lie_where_their_parameters_lie(tmp_path: Path, mesh: Mesh) -> None:
    def on(shape: tuple[int, ...], *spec: Any) -> Any:
        return jax.device_put(jnp.ones(shape), NamedSharding(mesh, P(*spec)))

    params = {
        "layers": [{"kernel": on((8, 4), "data", "model")}, {"kernel": on((8, 4), "model")}],
        "bias": on((4,), "model"),
    }
    tx = optax.chain(optax.clip(1.0), optax.adamw(1e-2), optax.masked(optax.trace(0.9), MATRICES))
    state = tx.init(params)
    ckpt.save(tmp_path / "a", params=params, opt_state=state)
    target = like_params(jax.eval_shape(tx.init, params), params)
    loaded = ckpt.load(tmp_path / "a", target, item="opt_state")
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for slots in (loaded[1][0].mu, loaded[1][0].nu, loaded[2].inner_state.trace):
        for index in range(2):
            kernel = params["layers"][index]["kernel"]
            assert slots["layers"][index]["kernel"].sharding == kernel.sharding
    assert loaded[1][0].mu["bias"].sharding == params["bias"].sharding
    assert loaded[1][0].count.sharding == NamedSharding(mesh, P())


def MATRICES(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def test_slots_without_a_parameter_of_their_shape(mesh: Mesh) -> None:
    params = {"w": jax.device_put(jnp.ones((128, 128)), NamedSharding(mesh, P("data", "model")))}
    state = like_params(jax.eval_shape(optax.adafactor(1e-2).init, params), params)
    replicated = NamedSharding(mesh, P())
    factored = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (128,)]
    assert len(factored) == 2
    assert all(leaf.sharding == replicated for leaf in factored)
    alone = like_params(jax.eval_shape(optax.adam(1e-2).init, params["w"]), params["w"])
    assert alone[0].mu.sharding == params["w"].sharding
    on_one_device = like_params(jax.eval_shape(optax.adam(1e-2).init, FREE), FREE)
    assert on_one_device[0].mu["w"].sharding == FREE["w"].sharding
    assert on_one_device[0].count.sharding is None


FREE = {"w": jnp.ones(3)}


def _arrays(objects: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path([ADAPTER.get_state(obj) for obj in objects])
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


@pytest.mark.parametrize("on_mesh", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_restore_or_init(on_mesh: bool, tmp_path: Path) -> None:
    mesh = make_mesh((4, 2)) if on_mesh else None

    def make() -> dict[str, Any]:
        if on_mesh:
            return build(0)
        model = MLP(0)
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}

    with ckpt.Checkpointer(tmp_path) as checkpointer:
        items, restored = restore_or_init(checkpointer, make, mesh)
        assert restored is None
        saved = state_of(items)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(saved))
        checkpointer.save(3, **items)
        checkpointer.wait_until_finished()
        again, restored = restore_or_init(checkpointer, make, mesh)
    assert restored.step == 3
    assert same(state_of(again), saved)


# --------------------------------------------------------------- the other half of the flax package


def test_linen_objects_are_plain_pytrees(tmp_path: Path) -> None:
    for cls in (TrainState, FrozenDict, nn.Partitioned, nn.Dense, nnx.TrainState):
        assert not ADAPTER.accepts(cls)
    tree = freeze({"params": {"kernel": nn.Partitioned(jnp.ones((2, 2)), (None, "model"))}})
    ckpt.save(tmp_path / "a", tree)
    loaded = ckpt.load(tmp_path / "a", jax.tree.map(jnp.zeros_like, tree))
    assert type(loaded) is FrozenDict
    assert same(loaded, tree)


def test_linen_train_state(tmp_path: Path) -> None:
    dense = nn.Dense(3)

    def make(seed: int) -> TrainState:
        params = dense.init(jax.random.key(seed), jnp.ones((1, 2)))["params"]
        return TrainState.create(apply_fn=dense.apply, params=params, tx=optax.adam(1e-2))

    state = make(0)
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    ckpt.save(tmp_path / "a", state)
    target = make(1)
    loaded = ckpt.load(tmp_path / "a", target)
    assert isinstance(loaded, TrainState)
    assert loaded.tx is target.tx
    assert type(loaded.step) is int
    assert loaded.step == 1
    assert same(jax.tree.leaves(loaded), jax.tree.leaves(state))


def test_objects_of_keras_are_not_taken() -> None:
    # In Keras' NNX mode its layers inherit from nnx.Module, and their attributes are no NNX graph.
    layer = type("Layer", (nnx.Module,), {"__module__": "keras.src.layers.layer"})
    mine = type("Mine", (layer,), {"__module__": "__main__"})
    assert not ADAPTER.accepts(layer)
    assert not ADAPTER.accepts(mine)


def test_linen_train_state_with_boxes_on_a_mesh(tmp_path: Path, mesh: Mesh) -> None:
    init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    dense = nn.Dense(4, kernel_init=init)
    tx = optax.adam(1e-2)  # static, so part of the structure

    def make() -> TrainState:
        params = dense.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
        return TrainState.create(apply_fn=dense.apply, params=params, tx=tx)

    abstract_state = jax.eval_shape(make)
    shardings = nn.get_sharding(abstract_state, mesh)
    state = jax.jit(make, out_shardings=shardings)()
    ckpt.save(tmp_path / "a", state)
    target = jax.tree.map(
        lambda box, sharding: jax.tree.map(lambda x: x.update(sharding=sharding), box),
        abstract_state,
        shardings,
        is_leaf=lambda x: isinstance(x, nn.Partitioned),
    )
    loaded = ckpt.load(tmp_path / "a", target)
    assert isinstance(loaded.params["kernel"], nn.Partitioned)
    assert loaded.params["kernel"].value.sharding.spec == P(None, "model")
    assert isinstance(loaded.step, jax.Array)
    assert same(loaded, state)


def test_averages_of_the_parameters(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        model = MLP(seed)
        return {"model": model, "ema": nnx.clone(model)}

    saved, live = make(0), make(1)
    saved["ema"].out.kernel[...] = saved["ema"].out.kernel[...] * 0.9
    ckpt.save(tmp_path / "a", **saved)
    ckpt.restore(tmp_path / "a", **live)
    assert same(state_of(live), state_of(saved))
    assert not same(state_of(live["ema"]), state_of(live["model"]))
    # The average alone serves evaluation.
    model = MLP(2)
    ckpt.restore(tmp_path / "a", ema=model)
    assert same(state_of(model), state_of(saved["ema"]))


def test_nnx_inside_linen(tmp_path: Path) -> None:
    linen = nnx.bridge.to_linen(nnx.Linear, 4, 3)
    variables = linen.init(jax.random.key(0), X)
    ckpt.save(tmp_path / "a", variables)
    other = linen.init(jax.random.key(1), X)
    loaded = ckpt.load(tmp_path / "a", other)
    assert same(loaded, variables)
    assert host(linen.apply(loaded, X)) == host(linen.apply(variables, X))


def test_linen_inside_nnx(tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        return nnx.bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(seed))

    model, other = make(0), make(1)
    model.lazy_init(X)
    ckpt.save(tmp_path / "a", model=model)
    with pytest.raises(ckpt.StructureMismatch, match="kernel"):
        ckpt.restore(tmp_path / "a", model=other)  # it has no parameters before lazy_init
    other.lazy_init(X)
    ckpt.restore(tmp_path / "a", model=other)
    assert same(state_of(other), state_of(model))


# ------------------------------------------------------------------------------------------ speed


@pytest.mark.slow
def test_a_thousand_layers_block_for_less_than_half_a_second(tmp_path: Path) -> None:
    model = MLP(0, layers=1000)
    ckpt.save(tmp_path / "warm", model=model)
    seconds = []
    for i in range(3):
        begin = time.perf_counter()
        pending = ckpt.save_async(tmp_path / str(i), model=model)
        seconds.append(time.perf_counter() - begin)
        pending.result()
    assert min(seconds) < 0.5, seconds


# ----------------------------------------------------------------------------------------- README


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme = INTEGRATIONS / "flax_nnx" / "README.md"
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    assert len(blocks) == 8
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(readme), "exec"), names)
    # The second run goes on after the last step: nothing is left to do.
    exec(compile(blocks[0], str(readme), "exec"), names)
    assert names["restored"].step == 4
