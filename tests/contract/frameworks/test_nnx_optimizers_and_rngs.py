"""Optimizers, random streams and metrics of NNX go on bit for bit."""

import pytest

import ckpt_core as ckpt

pytest.importorskip("flax")
pytest.importorskip("ckpt_flax_nnx")
import jax
import optax
from flax import nnx

from tests.support.compiling import make_quick_compilation  # noqa: F401 (fixture)
from tests.support.nnx_models import MLP, X, host, same, state_of, train_step

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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flax will drop it
def test_model_and_optimizer_in_one(tmp_path):
    made = nnx.ModelAndOptimizer(MLP(0), optax.adam(1e-2))
    other = nnx.ModelAndOptimizer(MLP(1), optax.adam(1e-2))
    ckpt.save(tmp_path / "a", both=made)
    ckpt.restore(tmp_path / "a", both=other)
    assert same(state_of(other), state_of(made))


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
