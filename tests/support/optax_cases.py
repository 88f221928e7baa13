"""Every public transformation of Optax, made with what it insists on."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt

pytest.importorskip("optax")
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

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
    "adaptive_grad_clip": FLAT,
    "galore": FLAT,
    "lookahead": optax.LookaheadParams.init_synced(PARAMS),
    "lbfgs": FLAT,
    "scale_by_galore": FLAT,
    "scale_by_lbfgs": FLAT,
    "scale_by_muon": {"kernel": jnp.ones((4, 4))},
    "scale_by_sm3": FLAT,
    "scale_by_zoom_linesearch": FLAT,
    "sm3": FLAT,
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

NAMES = [
    *CASES,
    *(
        pytest.param(name, marks=pytest.mark.skip(f"optax {optax.__version__} has no {name}"))
        for name in LACKING
    ),
]
"""All cases, as parameters of tests."""


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


def host(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return (str(value.dtype), np.asarray(jax.random.key_data(value)).tobytes())
    return (value.dtype.name, value.shape, np.asarray(value).tobytes())


def check(loaded: Any, saved: Any) -> None:
    """Same nodes, same bits, all of it jax arrays."""
    assert jax.tree.structure(loaded) == jax.tree.structure(saved)
    leaves = jax.tree.leaves(loaded)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert list(map(host, leaves)) == list(map(host, jax.tree.leaves(saved)))


class Everything:
    """All states in one checkpoint, and loaded again in each of the ways."""

    def __init__(self, path: Path):
        self.transformations = {name: make() for name, make in CASES.items()}
        self.abstract = {
            name: jax.eval_shape(tx.init, params_of(name))
            for name, tx in self.transformations.items()
        }
        self.saved = {name: filled(state) for name, state in self.abstract.items()}
        ckpt.save(path, self.saved)
        self.path = path

    @functools.cached_property
    def from_init(self) -> Any:
        return ckpt.load(
            self.path,
            {name: tx.init(params_of(name)) for name, tx in self.transformations.items()},
        )

    @functools.cached_property
    def from_abstract(self) -> Any:
        return ckpt.load(self.path, self.abstract)

    @functools.cached_property
    def without_target(self) -> Any:
        return ckpt.load(self.path)


@pytest.fixture(name="everything", scope="module")
def make_everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    return Everything(tmp_path_factory.mktemp("optax") / "all")
