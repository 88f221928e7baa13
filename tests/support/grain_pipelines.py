"""Grain pipelines of every shape."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("grain")
pytest.importorskip("ckpt_grain")
import grain
import jax
import numpy as np
from absl import flags
from grain import experimental as gx, python as gp

if not flags.FLAGS.is_parsed():
    flags.FLAGS(["tests"])  # mp_prefetch asks for a flag of Grain's


READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)


def record(i: Any) -> dict[str, Any]:
    return {"id": np.int64(i), "row": np.arange(3, dtype=np.float32) * int(i)}


def tokens(i: Any) -> dict[str, Any]:
    return {"tokens": np.full(1 + (int(i) * 5) % 11, int(i), np.int32)}


def jitter(element: Any, rng: np.random.Generator) -> dict[str, Any]:
    return {**element, "noise": rng.integers(0, 1 << 30)}


def two_of_three(element: Any) -> bool:
    return int(element["id"]) % 3 != 1


def one_of_seven(element: Any) -> bool:
    return int(element["id"]) % 7 == 0


class Repeat(gx.FlatMapTransform):
    max_fan_out = 3

    def flat_map(self, element: Any) -> list[Any]:
        return [element] * (int(element["id"]) % 3 + 1)


class ToRecord(grain.transforms.Map):
    def map(self, element: Any) -> Any:
        return record(element)


class Jitter(grain.transforms.RandomMap):
    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return jitter(element, rng)


class TwoOfThree(grain.transforms.Filter):
    def filter(self, element: Any) -> bool:
        return two_of_three(element)


class Numbers:
    """A source with a stable name."""

    def __init__(self, count: int = 200):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return int(index)

    def __repr__(self) -> str:
        return f"Numbers({self.count})"


def numbers(count: int = 200) -> grain.MapDataset:
    return grain.MapDataset.range(count)


def records(count: int = 200, seed: int = 1) -> grain.MapDataset:
    return numbers(count).seed(seed).shuffle().map(record)


def stream(count: int = 200, seed: int = 1) -> grain.IterDataset:
    return records(count, seed).to_iter_dataset(READ)


def parts(count: int, size: int) -> list[grain.IterDataset]:
    return [
        numbers(size).map(lambda i, k=k: record(1000 * k + i)).to_iter_dataset(READ)
        for k in range(count)
    ]


def loader(
    *operations: Any, workers: int = 0, source: Any = None, epochs: int | None = None
) -> Any:
    source = Numbers() if source is None else source
    return iter(
        grain.DataLoader(
            data_source=source,
            sampler=grain.samplers.IndexSampler(
                len(source),
                shard_options=grain.sharding.NoSharding(),
                shuffle=True,
                num_epochs=epochs,
                seed=7,
            ),
            operations=list(operations),
            worker_count=workers,
            shard_options=grain.sharding.NoSharding(),
            read_options=READ,
        )
    )


def elastic(shard: int = 0, count: int = 1, batch: int = 8, **options: Any) -> gx.ElasticIterator:
    shards = grain.sharding.ShardOptions(shard, count)
    return gx.ElasticIterator(records().repeat(), batch, shards, read_options=READ, **options)


def packed(cls: Any, **options: Any) -> grain.IterDataset:
    lines = numbers().seed(1).shuffle().map(tokens).to_iter_dataset(READ)
    return cls(lines, length_struct={"tokens": 16}, **options)


BINS = {"num_packing_bins": 4, "shuffle_bins": True, "seed": 4}
SHAPES: dict[str, Callable[[], Any]] = {
    "map, batch, repeat": lambda: records().batch(8).repeat().to_iter_dataset(READ),
    "repeat with new order": lambda: records(50).repeat().batch(8).to_iter_dataset(READ),
    "iterated map dataset": lambda: records().batch(4),
    "slice": lambda: records()[1::3].batch(4).to_iter_dataset(READ),
    "map filter": lambda: records().filter(two_of_three).to_iter_dataset(READ).batch(4),
    "random map on a map": lambda: (
        records().random_map(jitter, seed=3).batch(4).to_iter_dataset(READ)
    ),
    "filter": lambda: stream().filter(two_of_three).batch(4),
    "random map": lambda: stream().seed(5).random_map(jitter).batch(4),
    "map with index": lambda: (
        stream().filter(two_of_three).map_with_index(lambda i, e: {**e, "i": np.int64(i)}).batch(4)
    ),
    "window shuffle": lambda: gx.WindowShuffleIterDataset(stream(), window_size=20, seed=5).batch(
        4
    ),
    "mix of maps": lambda: (
        grain.MapDataset.mix([records(), records(40, 2).repeat()], weights=[0.7, 0.3])
        .shuffle(seed=3)
        .batch(4)
        .to_iter_dataset(READ)
    ),
    "mix": lambda: grain.IterDataset.mix(
        [stream(), stream(seed=2).filter(two_of_three)], weights=[0.7, 0.3]
    ).batch(4),
    "mix by name": lambda: grain.IterDataset.mix(
        {"web": stream(), "code": stream(seed=2)}, weights={"web": 0.7, "code": 0.3}
    ).batch(4),
    "first fit": lambda: packed(gx.FirstFitPackIterDataset, **BINS),
    "best fit": lambda: packed(gx.BestFitPackIterDataset, **BINS),
    "concat then split": lambda: packed(gx.ConcatThenSplitIterDataset).batch(2),
    "flat map": lambda: gx.FlatMapIterDataset(stream(), Repeat()).batch(4),
    "flat map, window shuffle": lambda: gx.WindowShuffleIterDataset(
        gx.FlatMapIterDataset(stream(), Repeat()), window_size=16, seed=2
    ).batch(4),
    "interleave": lambda: gx.InterleaveIterDataset(parts(6, 40), cycle_length=3).batch(4),
    "interleave, lazy": lambda: gx.InterleaveIterDataset(
        numbers(6).map(lambda k: parts(7, 40)[int(k)]), cycle_length=3
    ).batch(4),
    "interleave, uneven": lambda: gx.InterleaveIterDataset(
        [ds for size in (3, 30, 7, 50) for ds in parts(1, size)], cycle_length=3
    ).batch(4),
    "filter, sparse": lambda: records(400).filter(one_of_seven).to_iter_dataset(READ).batch(2),
    "remainder": lambda: stream(41).batch(4, drop_remainder=False),
    "rebatch": lambda: gx.RebatchIterDataset(stream().batch(7, drop_remainder=True), batch_size=4),
    "zip": lambda: gx.ZipIterDataset(
        [stream(), stream(seed=2).filter(two_of_three)], strict=False
    ).batch(4),
    "limit": lambda: gx.LimitIterDataset(stream().batch(4), count=40),
    "repeat": lambda: gx.RepeatIterDataset(stream(90).filter(two_of_three).batch(4)),
    "cache": lambda: gx.RepeatIterDataset(gx.CacheIterDataset(stream(100).batch(4)), num_epochs=3),
    "thread prefetch": lambda: gx.ThreadPrefetchIterDataset(
        stream().filter(two_of_three).batch(4), prefetch_buffer_size=8
    ),
    "threads": lambda: gx.multithread_prefetch(stream().batch(4), num_threads=2, buffer_size=4),
    "device put": lambda: gx.device_put(
        stream().batch(4), jax.devices()[0], cpu_buffer_size=4, device_buffer_size=2
    ),
    "in memory": lambda: grain.MapDataset.source([record(i) for i in range(90)]).batch(4),
    "elastic": lambda: elastic(),
    "elastic, iterated": lambda: iter(elastic()),
    "loader": lambda: loader(ToRecord(), Jitter(), grain.transforms.Batch(4)),
    "loader, filter": lambda: loader(ToRecord(), TwoOfThree(), grain.transforms.Batch(4)),
    "loader, flat map": lambda: loader(ToRecord(), Repeat(), grain.transforms.Batch(4)),
    "loader, batch operation": lambda: loader(ToRecord(), gp.BatchOperation(4)),
    "loader, two epochs": lambda: loader(ToRecord(), source=Numbers(30), epochs=2),
}


@pytest.fixture(name="opened")
def make_opened() -> Iterator[Callable[[Any], Any]]:
    """Turns a dataset (or what is an iterator already) into an iterator, closed at the end."""
    iterators: list[Any] = []

    def open_iterator(made: Any) -> Any:
        iterable = isinstance(made, (grain.MapDataset, grain.IterDataset))
        iterator = (
            made.__iter__() if iterable and not isinstance(made, gx.ElasticIterator) else made
        )
        iterators.append(iterator)
        return iterator

    yield open_iterator
    for iterator in iterators:
        getattr(iterator, "_iterator", iterator).close()


def plain(element: Any) -> Any:
    """An element as something that compares bit for bit and can be written as JSON."""
    leaves, structure = jax.tree.flatten(element)
    arrays = [np.asarray(leaf) for leaf in leaves]
    return [str(structure), *[[str(a.dtype), list(a.shape), a.tobytes().hex()] for a in arrays]]


def take(iterator: Any, count: int) -> list[Any]:
    """The next elements; fewer at the end of the data."""
    elements: list[Any] = []
    for _ in range(count):
        try:
            elements.append(plain(next(iterator)))
        except StopIteration:
            break
    return elements


Open = Callable[[Any], Any]
