"""Optax states: ordinary pytrees, which come back node for node and bit for bit."""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from optax import contrib

import ckpt_core as ckpt
from tests.support.compiling import make_quick_compilation  # noqa: F401 (fixture)
from tests.support.trees import assert_same

# Some factories are deprecated, or can only be called in a way that is.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*will be (required|removed)"),
]
Factory = Callable[[], Any]


def matrices(tree: Any) -> Any:
    """A mask: True for what has two dimensions or more."""
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def label(high: Any, low: Any) -> Callable[[Any], Any]:
    """Labels for ``optax.partition``: one for matrices, one for the rest."""
    return lambda tree: jax.tree.map(lambda x: high if x.ndim > 1 else low, tree)


PARAMS = {
    "layer": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones((4,))},
    "blocks": [{"w": jnp.ones((2, 2))}, {"w": jnp.ones((2, 2))}],
    "pair": (jnp.ones((3,)), jnp.ones((2, 1, 2))),
    "scale": jnp.ones(()),
}
FLAT = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones((4,))}
"""For transformations that know matrices and vectors only."""


# Public factories are called with whatever they insist on, found by the argument's name.
ARGUMENTS: dict[str, Any] = {
    "adv_optimizer": optax.sgd(1e-2),
    "base_optimizer": optax.adam(1e-2),
    "clipping": 0.1,
    "decay": 0.9,
    "eta": 0.1,
    "f": lambda updates, params: updates,
    "fast_optimizer": optax.adam(1e-2),
    "freeze_mask": matrices(PARAMS),
    "gamma": 0.5,
    "inner": optax.adam(1e-2),
    "inner_factory": None,  # the factory needs a second call, see SPECIAL
    "l2_norm_clip": 1.0,
    "learning_rate": 1e-2,
    "mask": matrices,
    "max_backtracking_steps": 5,
    "max_consecutive_errors": 3,
    "max_delta": 1.0,
    "max_linesearch_steps": 5,
    "max_norm": 1.0,
    "measure": optax.tree.norm,
    "measure_name": "norm",
    "noise_multiplier": 0.1,
    "optimizer": optax.adam(1e-2),
    "param_labels": label("many", "one"),
    "seed": 0,
    "should_transform_fn": lambda step: step < 5,
    "slow_step_size": 0.5,
    "step_size": 2.0,
    "step_size_fn": optax.linear_schedule(1e-2, 0.0, 10),
    "sync_period": 3,
    "threshold": 1.0,
    "transforms": {"many": optax.adam(1e-2), "one": optax.sgd(1e-2)},
    "tx": optax.adam(1e-2),
}


SPECIAL: dict[str, Factory] = {
    "chain": lambda: optax.chain(optax.clip(1.0), optax.adam(1e-2), optax.ema(0.9)),
    "freeze": lambda: optax.freeze(matrices(PARAMS)),
    "galore": lambda: contrib.galore(1e-2, rank=2),
    "hutchinson_estimator_diag_hessian": contrib.hutchinson_estimator_diag_hessian,
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-2, weight_decay=1e-3),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(
        optax.linear_schedule(1e-2, 0.0, 10)
    ),
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "monitor": lambda: optax.monitor({"norm": lambda updates, **_: optax.tree.norm(updates)}),
    "named_chain": lambda: optax.named_chain(
        ("z_first", optax.clip(1.0)), ("a_second", optax.adam(1e-2))
    ),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(1)),
    "scale_by_galore": lambda: contrib.scale_by_galore(rank=2),
    "scale_by_lbfgs": lambda: optax.scale_by_lbfgs(memory_size=2),
    "scale_by_muon": lambda: contrib.scale_by_muon(
        weight_dimension_numbers={"kernel": contrib.MuonDimensionNumbers()}
    ),
}


COMBINED: dict[str, Factory] = {
    "adafactor, factored": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "adam, bfloat16 moment": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "add_noise, typed key": lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(3)),
    "chain of chains": lambda: optax.chain(
        optax.chain(optax.adam(1e-2)), optax.chain(optax.trace(0.9), optax.identity())
    ),
    "linesearch with gradient": lambda: optax.scale_by_backtracking_linesearch(5, store_grad=True),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 3),
    "MultiSteps, skipping": lambda: optax.MultiSteps(
        optax.adam(1e-2), 3, should_skip_update_fn=optax.skip_not_finite
    ),
    "partition, int labels": lambda: optax.partition(
        {10: optax.adam(1e-2), 2: optax.sgd(1e-2, momentum=0.9)}, label(10, 2)
    ),
    "partition, nested": lambda: optax.partition(
        {"many": optax.chain(optax.clip(1.0), optax.lion(1e-2)), "one": optax.set_to_zero()},
        label("many", "one"),
    ),
    "plateau": lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=2)),
    "rmsprop, centered": lambda: optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "sam, opaque": lambda: contrib.sam(
        optax.adam(1e-2), optax.chain(contrib.normalize(), optax.sgd(1e-2)), opaque_mode=True
    ),
    "schedule and mask": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 10), mask=matrices),
    "snapshot of a tree": lambda: optax.snapshot("g", lambda updates: updates),
    "everything": lambda: optax.apply_if_finite(
        optax.MultiSteps(
            optax.partition(
                {
                    "many": optax.inject_hyperparams(optax.adamw)(
                        optax.linear_schedule(1e-2, 0.0, 10)
                    ),
                    "one": optax.masked(optax.sgd(1e-2, momentum=0.9), matrices),
                },
                label("many", "one"),
            ),
            2,
        ).gradient_transformation(),
        3,
    ),
}


ODD_PARAMS: dict[str, Any] = {
    "params: array": jnp.ones((3,)),
    "params: bfloat16": {"a": jnp.ones((4, 4), jnp.bfloat16)},
    "params: complex": {"a": jnp.ones((3,), jnp.complex64), "b": jnp.ones((3,))},
    "params: int keys": {10: jnp.ones((2,)), 1: jnp.ones((2, 2)), 0: jnp.ones((1,))},
    "params: list": [jnp.ones((3,)), (jnp.ones(()),)],
    "params: none and empty": {"a": jnp.ones((3,)), "n": None, "d": {}, "t": (), "l": []},
    "params: nothing": {},
    "params: slashes": {"a/b": jnp.ones((2,)), "a": {"b": jnp.zeros((2,))}},
}


OTHER_PARAMS: dict[str, Any] = {
    **dict.fromkeys(("adaptive_grad_clip", "galore", "lbfgs", "scale_by_galore"), FLAT),
    **dict.fromkeys(("scale_by_lbfgs", "scale_by_sm3", "scale_by_zoom_linesearch", "sm3"), FLAT),
    "lookahead": optax.LookaheadParams.init_synced(PARAMS),
    "scale_by_muon": {"kernel": jnp.ones((4, 4))},
    "split_real_and_imaginary": ODD_PARAMS["params: complex"],
}


def public_factories() -> dict[str, Callable[..., Any]]:
    """Every public function of Optax that says that it returns a transformation."""
    found: dict[str, Callable[..., Any]] = {}
    for module in (optax, contrib):
        for name, value in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(value):
                continue
            if "GradientTransformation" in str(inspect.signature(value).return_annotation):
                found[name] = value
    return found


def made_by_name(factory: Callable[..., Any]) -> Any:
    """The transformation, from a factory called with what its required arguments ask for."""
    required = [
        name
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is parameter.empty
    ]
    return factory(**{name: ARGUMENTS[name] for name in required})


def all_cases() -> dict[str, Factory]:
    named = {
        name: SPECIAL.get(name, functools.partial(made_by_name, factory))
        for name, factory in public_factories().items()
    }
    odd: dict[str, Factory] = dict.fromkeys(ODD_PARAMS, lambda: optax.adam(1e-2))
    return SPECIAL | named | COMBINED | odd


LACKING = sorted(name for name in SPECIAL if not (hasattr(optax, name) or hasattr(contrib, name)))
"""Transformations that the installed Optax does not have yet."""

CASES = {name: make for name, make in all_cases().items() if name not in LACKING}


def params_of(name: str) -> Any:
    return ODD_PARAMS.get(name, OTHER_PARAMS.get(name, PARAMS))


def filled(abstract: Any) -> Any:
    """Arrays with bits of their own for every leaf of an abstract state."""
    counter = 0

    def fill(leaf: Any) -> Any:
        nonlocal counter
        counter += 1
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(counter), leaf.shape)
        values = np.arange(leaf.size).reshape(leaf.shape) + counter
        return jnp.asarray(values.astype(leaf.dtype))

    return jax.tree.map(fill, abstract)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """All states in one checkpoint, and loaded into what `init` makes, into shapes, and without a target."""
    path = tmp_path_factory.mktemp("optax") / "all"
    made = {name: make() for name, make in CASES.items()}
    shapes = {name: jax.eval_shape(tx.init, params_of(name)) for name, tx in made.items()}
    saved = {name: filled(state) for name, state in shapes.items()}
    ckpt.save(path, saved)
    begun = {name: tx.init(params_of(name)) for name, tx in made.items()}
    return saved, [ckpt.load(path, begun), ckpt.load(path, shapes), ckpt.load(path)]


@pytest.mark.parametrize("name", CASES)
def test_every_state_comes_back(name, everything):
    saved, loaded = everything
    for found in loaded:
        assert_same(found[name], saved[name])


def test_no_factory_is_left_out():
    assert len(CASES) + len(LACKING) > 140
    assert set(public_factories()) <= set(CASES)


def test_weak_types_come_back(tmp_path):
    # Without them every step would be compiled again after a restore.
    state = {"init": optax.adam(1e-2).init({"scale": jnp.asarray(1.0)}), "scale": jnp.asarray(1.0)}
    state["lbfgs"] = optax.lbfgs(memory_size=2).init(FLAT)
    weak = [leaf.weak_type for leaf in jax.tree.leaves(state)]
    assert any(weak)
    ckpt.save(tmp_path / "a", state)
    for loaded in (ckpt.load(tmp_path / "a"), ckpt.load(tmp_path / "a", state)):
        assert [leaf.weak_type for leaf in jax.tree.leaves(loaded)] == weak


class RenamedAdamState(NamedTuple):
    """What a later Optax might call its ScaleByAdamState."""

    count: Any
    mu: Any
    nu: Any


def test_a_class_that_was_renamed_with_the_same_fields(tmp_path):
    state = filled(optax.adam(1e-2).init(FLAT))
    ckpt.save(tmp_path / "a", state)
    target = (RenamedAdamState(*state[0]), *state[1:])
    loaded = ckpt.load(tmp_path / "a", jax.tree.map(jnp.zeros_like, target))
    assert_same(loaded, target)


def test_nodes_without_leaves_are_distinguished(tmp_path):
    state = {
        **{"empty": optax.EmptyState(), "masked": optax.MaskedNode(), "none": None, "tuple": ()},
        **{"list": [], "dict": {}, "ordered": OrderedDict([("z", ()), ("a", None)])},
    }
    ckpt.save(tmp_path / "a", state)
    loaded = ckpt.load(tmp_path / "a")
    assert_same(loaded, state)
    assert list(loaded["ordered"]) == ["z", "a"]


@pytest.mark.skipif("monitor" in LACKING, reason=f"optax {optax.__version__} has no monitor")
def test_what_training_adds_to_the_state_loads_without_a_target(tmp_path):
    tx = CASES["monitor"]()
    _, state = tx.update(FLAT, tx.init(FLAT), FLAT)
    ckpt.save(tmp_path / "a", state)
    assert_same(ckpt.load(tmp_path / "a"), state)
    with pytest.raises(ckpt.StructureMismatch, match="norm"):
        ckpt.load(tmp_path / "a", tx.init(FLAT))


def kinds(error: pytest.ExceptionInfo[ckpt.StructureMismatch], kind: str) -> set[str]:
    return {mismatch.path for mismatch in error.value.mismatches if mismatch.kind == kind}


def test_another_optimizer_is_refused_with_both_sides(tmp_path):
    ckpt.save(tmp_path / "a", optax.adam(1e-2).init(FLAT))
    with pytest.raises(ckpt.StructureMismatch) as amsgrad:
        ckpt.load(tmp_path / "a", optax.amsgrad(1e-2).init(FLAT))
    assert kinds(amsgrad, "missing") == {"0/nu_max/bias", "0/nu_max/kernel"}
    assert kinds(amsgrad, "unexpected") == set()
    with pytest.raises(ckpt.StructureMismatch) as sgd:
        ckpt.load(tmp_path / "a", optax.sgd(1e-2).init(FLAT))
    assert len(kinds(sgd, "unexpected")) == 5
    schedule = optax.adamw(optax.linear_schedule(1e-2, 0.0, 10))
    with pytest.raises(ckpt.StructureMismatch) as scheduled:
        ckpt.load(tmp_path / "a", schedule.init(FLAT))
    assert kinds(scheduled, "missing") == {"2/count"}


def test_a_transformation_put_in_front_pairs_the_paths_and_rename_solves_it(tmp_path):
    state = filled(optax.chain(optax.adam(1e-2), optax.scale(2.0)).init(FLAT))
    ckpt.save(tmp_path / "a", state)
    target = optax.chain(optax.clip(1.0), optax.adam(1e-2), optax.scale(2.0)).init(FLAT)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.load(tmp_path / "a", target)
    nearest = {m.path: m.nearest for m in caught.value.mismatches if m.kind == "missing"}
    assert nearest["1/0/mu/kernel"] == "0/0/mu/kernel"
    loaded = ckpt.load(tmp_path / "a", target, rename={"0": "1"})
    assert_same(jax.tree.leaves(loaded), jax.tree.leaves(state))
    assert jax.tree.structure(loaded) == jax.tree.structure(target)


def test_a_learning_rate_from_the_code_instead_of_the_disk(tmp_path):
    make = optax.inject_hyperparams(optax.adam)
    ckpt.save(tmp_path / "a", filled(make(0.01).init(FLAT)))
    target = make(123.0).init(FLAT)
    kept = ckpt.load(tmp_path / "a", target, only=lambda path, leaf: "hyperparams" not in path)
    assert kept.hyperparams["learning_rate"] == 123.0
    assert ckpt.load(tmp_path / "a", target).hyperparams["learning_rate"] != 123.0
    assert kept.count != 0


@pytest.mark.parametrize("target", ["init", "eval_shape"])
def test_sharded_slots_and_uncommitted_counts(target, tmp_path, mesh):
    sharding = NamedSharding(mesh, P("data", "model"))
    params = {"w": jax.device_put(jnp.ones((8, 4)), sharding)}
    tx = optax.adam(1e-2)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(lambda p: (p["w"] ** 2).sum())(params), state, params)
        return optax.apply_updates(params, updates), state

    new_params, state = step(params, tx.init(params))
    ckpt.save(tmp_path / "a", params=new_params, optimizer=state)
    like = tx.init(params)
    if target == "eval_shape":
        slot = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
        like = jax.eval_shape(tx.init, params)
        like = (like[0]._replace(mu={"w": slot}, nu={"w": slot}), *like[1:])
    restored = ckpt.restore(tmp_path / "a", params=params, optimizer=like)
    optimizer = restored["optimizer"]
    assert optimizer[0].mu["w"].sharding == sharding
    if target == "init":
        assert not optimizer[0].count.committed
    else:  # a shape without a sharding beside others on a mesh: one copy for each of its devices
        assert optimizer[0].count.sharding.device_set == set(mesh.devices.flat)
    assert_same(step(restored["params"], optimizer), step(new_params, state))
