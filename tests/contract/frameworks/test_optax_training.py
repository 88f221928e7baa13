"""Training with Optax goes on bit for bit; other optimizers and meshes."""

from collections.abc import Callable
from typing import Any

import pytest

import ckpt_core as ckpt

pytest.importorskip("optax")
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.optax_cases import (
    CASES,
    FLAT,
    LACKING,
    NAMES,
    check,
    filled,
    host,
    params_of,
)

# Some factories are deprecated, or can only be called in a way that is.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*will be (required|removed)"),
]


NEW_AFTER_INIT = {"monitor"}
"""Their first update adds entries, so that ``init`` is no target for what training left."""


def make_step(tx: Any) -> Callable[[Any, Any], Any]:
    @jax.jit
    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(objective)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def objective(params: Any) -> Any:
    leaves = jax.tree.leaves(params)
    return jnp.real(sum((jnp.sum(jnp.abs(leaf - 0.3) ** 2) for leaf in leaves), jnp.float32(0)))


def asked_by(name: str, params: Any, grads: Any) -> dict[str, Any]:
    """What the updates of some transformations ask for beyond gradients and parameters."""
    if name.startswith("sam"):
        return {"grad_fn": lambda params, _: jax.grad(objective)(params)}
    asked = {"grad": grads, "value": objective(params), "value_fn": objective}
    return asked if "linesearch" in name or "lbfgs" in name else {**asked, "obj_fn": objective}


def trained(name: str, tx: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """Parameters and state after one more update, in plain Python."""
    fast = params.fast if isinstance(params, optax.LookaheadParams) else params
    grads = jax.grad(objective)(fast)
    if name in ("dpsgd", "differentially_private_aggregate"):
        grads = jax.tree.map(lambda grad: jnp.stack([grad, grad / 2]), grads)  # per example
    if isinstance(tx, optax.GradientTransformation):
        asked = asked_by(name, fast, grads)
        updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **asked)
    else:
        updates, state = tx.update(grads, state, params)
    if jax.tree.structure(updates) != jax.tree.structure(params):
        return params, state  # it measures, and its updates are the measurement
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("name", NAMES)
def test_training_of_every_kind_goes_on_bit_for_bit(name, tmp_path):
    tx = CASES[name]()
    params = params_of(name)
    params, state = trained(name, tx, params, tx.init(params))
    ckpt.save(tmp_path / "a", params=params, state=state)
    if name in NEW_AFTER_INIT:
        loaded = ckpt.load(tmp_path / "a")
    else:
        fresh = {
            "params": jax.tree.map(jnp.zeros_like, params),
            "state": tx.init(params_of(name)),
        }
        loaded = ckpt.load(tmp_path / "a", fresh)
    expected = trained(name, tx, params, state)
    check(trained(name, tx, loaded["params"], loaded["state"]), expected)


@pytest.mark.skipif("monitor" in LACKING, reason=f"optax {optax.__version__} has no monitor")
def test_what_training_adds_to_the_state_loads_without_a_target(tmp_path):
    tx = CASES["monitor"]()
    _, state = tx.update(FLAT, tx.init(FLAT), FLAT)
    ckpt.save(tmp_path / "a", state)
    check(ckpt.load(tmp_path / "a"), state)
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
    assert list(map(host, jax.tree.leaves(loaded))) == list(map(host, jax.tree.leaves(state)))
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
    step = make_step(tx)
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
    check(step(restored["params"], optimizer), step(new_params, state))
