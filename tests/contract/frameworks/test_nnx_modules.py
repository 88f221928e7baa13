"""Live objects of Flax NNX, saved and restored in one call each: modules, optimizers, streams; in part, and refused; and Linen's states."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState
from jax.experimental import hijax
from jax.sharding import PartitionSpec as P

import ckpt_core as ckpt
from ckpt_flax_nnx import ADAPTER, abstract
from tests.support.compiling import make_quick_compilation  # noqa: F401 (fixture)
from tests.support.nnx_models import MLP, Holder, X, host, same, state_of, train_step

NEEDS_HIJAX = pytest.mark.skipif(
    not hasattr(hijax, "instantiate_zeros"),
    reason=f"jax {jax.__version__} lacks what hijax variables of flax need",
)


def test_model_comes_back_into_live_and_merged_objects(tmp_path):
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


def test_without_a_target_lists_have_int_keys(tmp_path):
    model = MLP(0)
    ckpt.save(tmp_path / "a", model=model)
    loaded = ckpt.load(tmp_path / "a")["model"]
    assert list(loaded["layers"]) == [0, 1]
    assert same(loaded, state_of(model))


def test_text_digits_and_positions_stay_apart(tmp_path):
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


@pytest.mark.parametrize("as_hijax", [False, pytest.param(True, marks=NEEDS_HIJAX)])
def test_every_sort_of_leaf_is_set_where_it_lives(as_hijax, tmp_path):
    def make(k: float) -> Holder:
        return Holder(
            scalar=nnx.Variable(3.0 + k),
            nothing=nnx.Variable(None),
            several=nnx.Variable([jnp.full(1, k), jnp.full(2, k)]),
            array=nnx.data(jnp.full(2, k)),
            numpy=nnx.data(np.arange(3) + int(k)),
            in_tuple=nnx.data((jnp.full(1, k), {"x": np.full(2, k)})),
            reference=nnx.Param(jnp.full(2, k), ref=True),
            hijax=nnx.Param(jnp.full(2, k), hijax=as_hijax),
            both=nnx.Param(jnp.full(2, k), ref=True, hijax=as_hijax),
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


def test_a_bare_variable_and_a_state_are_targets_too(tmp_path):
    model, other = MLP(0), MLP(1)
    ckpt.save(tmp_path / "a", kernel=model.out.kernel, params=nnx.state(model, nnx.Param))
    ckpt.restore(tmp_path / "a", kernel=other.out.kernel, params=nnx.state(other, nnx.Param))
    assert same(state_of(nnx.state(other, nnx.Param)), state_of(nnx.state(model, nnx.Param)))
    assert not same(state_of(other.dropout), state_of(model.dropout))


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    model, other = tied(0), tied(1)
    ckpt.save(tmp_path / "a", model=model)
    leaves = ckpt.inspect(tmp_path / "a").items["model"].leaves
    assert sorted(leaf.path for leaf in leaves) == ["emb/embedding", "head/bias"]
    ckpt.restore(tmp_path / "a", model=other)
    assert other.head.kernel is other.emb.embedding
    assert same(state_of(other), state_of(model))
    # Code that no longer ties asks for a weight that was not stored, and the error names it.
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", model=tied(2, tie=False))
    assert [(m.kind, m.path) for m in caught.value.mismatches] == [("missing", "head/kernel")]


def tied(seed: int, *, tie: bool = True) -> Holder:
    rngs = nnx.Rngs(seed)
    model = Holder(emb=nnx.Embed(4, 4, rngs=rngs), head=nnx.Linear(4, 4, rngs=rngs))
    if tie:
        model.head.kernel = model.emb.embedding
    return model


def test_a_tied_checkpoint_in_code_that_does_not_tie(tmp_path):
    saved, live = tied(0), tied(1, tie=False)
    ckpt.save(tmp_path / "a", model=saved)
    restored = ckpt.restore(tmp_path / "a", model=live, missing="keep")
    assert restored.report.missing == ("model/head/kernel",)
    live.head.kernel.set_value(live.emb.embedding.get_value())
    assert live.head.kernel is not live.emb.embedding
    assert same(live.head.kernel.get_value(), saved.head.kernel.get_value())
    assert same(live.emb.embedding.get_value(), saved.emb.embedding.get_value())


def test_an_untied_checkpoint_in_code_that_ties(tmp_path):
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
def test_variables_shared_between_modules_of_a_container(container, tmp_path):
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


def test_shared_variables_of_an_abstract_pair(tmp_path):
    def make() -> tuple[Any, Any]:
        first, second = (nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2))
        second.kernel = first.kernel
        first.held, second.held = nnx.data({"a": jnp.arange(3.0)}), nnx.data([jnp.ones(2)])
        return first, second

    saved, live = make(), abstract(make)
    ckpt.save(tmp_path / "a", saved)
    ckpt.restore(tmp_path / "a", state=live)
    assert live[1].kernel is live[0].kernel
    assert same([*map(state_of, live)], [*map(state_of, saved)])


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
def test_raw_values_are_stored_not_what_hooks_make_of_them(tmp_path):
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


def test_live_metadata_stays(tmp_path):
    ckpt.save(tmp_path / "a", model=Holder(w=nnx.Param(jnp.ones(2), tag="saved")))
    live = Holder(w=nnx.Param(jnp.zeros(2), tag="live", extra=np.ones(2)))
    ckpt.restore(tmp_path / "a", model=live)
    assert live.w.get_metadata("tag") == "live"
    assert "extra" in live.w.get_metadata()
    assert np.array_equal(live.w.get_value(), [1.0, 1.0])


def test_caches_are_state_and_intermediates_are_not(tmp_path):
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


class Average(nnx.Module):
    """Counts its updates in a static number."""

    def __init__(self, updates: int, train: bool = True) -> None:
        self.updates = updates
        self.train_mode = train
        self.inside = nnx.data({"a": nnx.List([nnx.Dropout(0.5 if updates else 0.1)])})
        self.kept = nnx.Param(jnp.ones(2))


def test_a_static_number_is_warned_of(tmp_path):
    ckpt.save(tmp_path / "a", nets={"ema": Average(5)}, one=Average(5))
    ckpt.restore(tmp_path / "a", nets={"ema": Average(5, False)}, one=Average(5))
    target = Average(0)
    with pytest.warns(UserWarning, match=r"nets: ema/updates: .* saved 5, wanted 0; .*0/rate.*Set"):
        ckpt.restore(tmp_path / "a", nets={"ema": target}, one=Average(5))
    with pytest.warns(UserWarning, match=r"one: updates: static differs: saved 5, wanted 0"):
        ckpt.load(tmp_path / "a", {"one": target})
    ckpt.load(tmp_path / "a", {"one": target}, static="target")
    assert target.updates == 0


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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(name, tmp_path):
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


def test_stacked_layers_with_key_arrays(tmp_path):
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


def test_missing_and_extra_leaves_are_listed_and_can_be_kept(tmp_path):
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


def test_only_the_parameters(tmp_path):
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
def test_filters_of_nnx(only, loaded, tmp_path):
    model, other = MLP(0), MLP(1)
    ckpt.save(tmp_path / "a", model=model)
    restored = ckpt.restore(tmp_path / "a", model=other, only=only)
    found = {path.removeprefix("model/") for path in restored.report.loaded}
    assert loaded <= found
    assert ("out/kernel" in found) is False
    expected = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, only))}
    assert found == expected


def test_a_filter_with_an_optimizer_beside(tmp_path):
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


def test_renamed_attributes(tmp_path):
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


def test_lora_added_after_the_save(tmp_path):
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


# The other half of the flax package: Linen's states, with and within NNX


def test_linen_objects_are_plain_pytrees(tmp_path):
    for cls in (TrainState, FrozenDict, nn.Partitioned, nn.Dense, nnx.TrainState):
        assert not ADAPTER.accepts(cls)
    tree = freeze({"params": {"kernel": nn.Partitioned(jnp.ones((2, 2)), (None, "model"))}})
    ckpt.save(tmp_path / "a", tree)
    loaded = ckpt.load(tmp_path / "a", jax.tree.map(jnp.zeros_like, tree))
    assert type(loaded) is FrozenDict
    assert same(loaded, tree)


def test_objects_of_keras_are_not_taken():
    # In Keras' NNX mode its layers inherit from nnx.Module, and their attributes are no NNX graph.
    layer = type("Layer", (nnx.Module,), {"__module__": "keras.src.layers.layer"})
    mine = type("Mine", (layer,), {"__module__": "__main__"})
    assert not ADAPTER.accepts(layer)
    assert not ADAPTER.accepts(mine)


def test_linen_train_state_with_boxes_on_a_mesh(tmp_path, mesh):
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


def test_nnx_inside_linen(tmp_path):
    linen = nnx.bridge.to_linen(nnx.Linear, 4, 3)
    variables = linen.init(jax.random.key(0), X)
    ckpt.save(tmp_path / "a", variables)
    other = linen.init(jax.random.key(1), X)
    loaded = ckpt.load(tmp_path / "a", other)
    assert same(loaded, variables)
    assert host(linen.apply(loaded, X)) == host(linen.apply(variables, X))


def test_linen_inside_nnx(tmp_path):
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
