"""The suite of ``ckpt_core.testing``, passed by our own adapters and by a user's own class."""

from collections.abc import Callable, Mapping
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from grain import experimental as gx

from ckpt_core.testing import InPlaceSuite, PytreeSuite
from tests.contract.conformance import CasesSuite, each_of, given


class Net(nnx.Module):
    """Something of everything: lists, statistics, dropout keys, tied weights, bare arrays."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed, dropout=seed + 1)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tied = nnx.Linear(8, 8, rngs=rngs)
        self.tied.kernel = self.layers[0].kernel
        self.offset = nnx.data(jnp.full(8, 0.1 * seed))
        self.count = nnx.Variable(jnp.asarray(seed, jnp.int32))

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.tied(self.dropout(self.norm(x))) + self.offset


@nnx.jit
def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


class Training(nnx.Module):
    """A model and its optimizer in one object."""

    def __init__(self, seed: int) -> None:
        self.model = Net(seed)
        self.optimizer = nnx.Optimizer(self.model, ADAM, wrt=nnx.Param)


ADAM = optax.adam(1e-2)
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def make_training(seed: int) -> Training:
    return Training(seed)


def step_training(training: Training) -> Any:
    training.model.count[...] += 1
    return train_step(training.model, training.optimizer, X)


def make_rngs(seed: int) -> nnx.Rngs:
    return nnx.Rngs(seed, dropout=jax.random.key(seed + 7, impl="rbg"))


def step_rngs(rngs: nnx.Rngs) -> Any:
    return [rngs.default(), rngs.dropout()]


def make_metrics(seed: int) -> nnx.MultiMetric:
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average(), spread=nnx.metrics.Welford())
    metrics.update(values=jnp.arange(3.0) + seed)
    return metrics


def step_metrics(metrics: nnx.MultiMetric) -> Any:
    metrics.update(values=jnp.asarray([1.0, 5.0]))
    return metrics.compute()


CASES = {
    "training": (make_training, step_training),
    "rngs": (make_rngs, step_rngs),
    "metrics": (make_metrics, step_metrics),
}


class TestNnx(CasesSuite):
    case = each_of(CASES)


CHAIN = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.masked(optax.adamw(1e-2), {"kernel": True, "bias": False}),
    optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 10)),
)


def make_state(seed: int) -> Any:
    params = {"kernel": jnp.full((8, 3), 1.0 + seed), "bias": jnp.full(3, 0.5)}
    return {"params": params, "state": CHAIN.init(params)}


@jax.jit
def step_state(tree: Any) -> Any:
    params, state = tree["params"], tree["state"]
    grads = jax.tree.map(lambda x: x * 0.3 + 0.1, params)
    updates, state = CHAIN.update(grads, state, params)
    return {"params": optax.apply_updates(params, updates), "state": state}


class TestOptax(PytreeSuite):
    make = given(make_state)
    step = given(step_state)


READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


def numbers(seed: int = 1, batch: int = 4) -> Any:
    dataset = grain.MapDataset.range(40).seed(seed).shuffle().repeat()
    return dataset.to_iter_dataset(READ).batch(batch)


def packed() -> Any:
    lines = grain.MapDataset.range(60).map(tokens).repeat().to_iter_dataset(READ)
    return gx.ConcatThenSplitIterDataset(lines, length_struct={"tokens": 16})


def tokens(i: Any) -> dict[str, Any]:
    return {"tokens": np.full(1 + int(i) * 5 % 11, int(i), np.int32)}


def advanced(iterator: Any, count: int) -> Any:
    for _ in range(count):
        next(iterator)
    return iterator


def make_numbers(seed: int) -> Any:
    return advanced(iter(numbers()), 3 * seed)


def make_packed(seed: int) -> Any:
    return advanced(iter(packed()), 3 * seed)


def make_prefetched(seed: int) -> Any:
    return advanced(iter(gx.ThreadPrefetchIterDataset(numbers(), prefetch_buffer_size=4)), seed * 3)


def make_elastic(seed: int) -> Any:
    dataset = grain.MapDataset.range(40).seed(1).shuffle().repeat()
    sharding = grain.sharding.ShardOptions(0, 1)
    return advanced(iter(gx.ElasticIterator(dataset, 8, sharding, read_options=READ)), 3 * seed)


def make_loader(seed: int) -> Any:
    sampler = grain.samplers.IndexSampler(40, shuffle=True, seed=3)
    source = [{"i": i} for i in range(40)]
    loader = grain.DataLoader(data_source=source, sampler=sampler, read_options=READ)
    return advanced(iter(loader), 3 * seed)


class TestGrain(InPlaceSuite):
    @pytest.fixture(params=[make_packed, make_numbers, make_prefetched, make_elastic, make_loader])
    def make(self, request: pytest.FixtureRequest) -> Callable[[int], Any]:
        return request.param

    step = given(next)

    @pytest.fixture
    def misfits(self) -> Mapping[str, Callable[[], Any]]:
        return {
            "another batch size": lambda: iter(numbers(batch=5)),
            "another seed": lambda: iter(numbers(seed=2)),
            "another pipeline": lambda: iter(packed().batch(2)),
        }


class Counter:
    """Takes part by its own methods, without an adapter."""

    def __init__(self, seed: int) -> None:
        self.counts = {"steps": seed, "sums": jnp.arange(8.0) * seed}

    def get_state(self) -> Any:
        return dict(self.counts)

    def set_state(self, state: Any) -> None:
        self.counts = dict(state)


def step_counter(counter: Counter) -> Any:
    counter.counts["steps"] += 1
    counter.counts["sums"] = counter.counts["sums"] + counter.counts["steps"]
    return counter.counts["steps"]


class TestStateful(InPlaceSuite):
    make = given(Counter)
    step = given(step_counter)
