"""Grain pipelines of every shape go on with exactly the next element."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt

pytest.importorskip("grain")
pytest.importorskip("ckpt_grain")
import grain
import numpy as np
from grain import experimental as gx

from ckpt_grain import ADAPTER, with_proof
from tests.support.grain_pipelines import (
    BINS,
    READ,
    SHAPES,
    Jitter,
    Open,
    Repeat,
    ToRecord,
    TwoOfThree,
    elastic,
    jitter,
    loader,
    make_opened,  # noqa: F401 (fixtures)
    numbers,
    packed,
    parts,
    records,
    stream,
    take,
    two_of_three,
)

WORKERS = grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=2)


# ------------------------------------------------------------------------------------- pipelines


# Every worker takes about a second to start.
SLOW_SHAPES: dict[str, Callable[[], Any]] = {
    "window shuffle, large": lambda: gx.WindowShuffleIterDataset(
        stream(3000), window_size=1000, seed=5
    ).batch(4),
    "workers": lambda: records().batch(8).repeat().to_iter_dataset(READ).mp_prefetch(WORKERS),
    "workers, filter": lambda: stream().filter(two_of_three).batch(8).mp_prefetch(WORKERS),
    "workers, then batch": lambda: (
        records().repeat().to_iter_dataset(READ).mp_prefetch(WORKERS).batch(8)
    ),
    "workers, then window": lambda: gx.WindowShuffleIterDataset(
        stream().mp_prefetch(WORKERS), window_size=17, seed=5
    ).batch(4),
    "workers, packing": lambda: packed(gx.FirstFitPackIterDataset, **BINS).mp_prefetch(WORKERS),
    "workers, interleave": lambda: (
        gx.InterleaveIterDataset(parts(12, 60), cycle_length=4).batch(4).mp_prefetch(WORKERS)
    ),
    "workers, repeat": lambda: gx.RepeatIterDataset(stream(90).batch(4).mp_prefetch(WORKERS)),
    "workers, mix": lambda: (
        grain.IterDataset.mix([stream(), stream(seed=2)], weights=[0.5, 0.5])
        .batch(4)
        .mp_prefetch(WORKERS)
    ),
    "workers, random map": lambda: (
        stream().random_map(jitter, seed=9).batch(8).mp_prefetch(WORKERS)
    ),
    "elastic, workers": lambda: elastic(1, 2, multiprocessing_options=WORKERS),
    "loader, workers": lambda: loader(ToRecord(), Jitter(), grain.transforms.Batch(4), workers=2),
    "loader, workers, filter": lambda: loader(ToRecord(), TwoOfThree(), workers=2),
    "loader, workers, flat map": lambda: loader(ToRecord(), Repeat(), workers=2),
}


# The long tests run for these shapes each time, and for all of them in `make test-all`.
TRICKY = {
    "repeat with new order",
    "window shuffle",
    "mix by name",
    "concat then split",
    "flat map",
    "interleave",
    "thread prefetch",
    "loader, filter",
    "loader, two epochs",
}


TRICKY_FIRST = [
    shape if shape in TRICKY else pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES
]


def resumes(make: Callable[[], Any], opened: Open, path: Path, consumed: int, then: int) -> None:
    """Saves after some elements; a new object and the same one both go on from there."""
    iterator = opened(make())
    take(iterator, consumed)
    ckpt.save(path, data=iterator)
    expected = take(iterator, then)
    other = opened(make())
    ckpt.restore(path, data=other)
    assert take(other, then) == expected
    ckpt.restore(path, data=iterator)
    assert take(iterator, then) == expected


# ---------------------------------------------------------------------------------- exact resume


@pytest.mark.parametrize("shape", SHAPES)
def test_goes_on_exactly(shape: str, tmp_path: Path, opened: Open) -> None:
    resumes(SHAPES[shape], opened, tmp_path / "a", 7, 12)


def test_goes_on_exactly_with_worker_processes(tmp_path: Path, opened: Open) -> None:
    resumes(SLOW_SHAPES["workers, filter"], opened, tmp_path / "a", 5, 8)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SLOW_SHAPES)
@pytest.mark.parametrize("consumed", [1, 5])
def test_goes_on_exactly_with_workers(
    shape: str, consumed: int, tmp_path: Path, opened: Open
) -> None:
    resumes(SLOW_SHAPES[shape], opened, tmp_path / "a", consumed, 20)


@pytest.mark.parametrize("shape", TRICKY_FIRST)
def test_from_the_first_element_and_after_the_last(
    shape: str, tmp_path: Path, opened: Open
) -> None:
    make = SHAPES[shape]
    ckpt.save(tmp_path / "first", data=opened(make()))
    other = opened(make())
    take(other, 3)
    ckpt.restore(tmp_path / "first", data=other)
    assert take(other, 3) == take(opened(make()), 3)
    iterator = opened(make())
    if len(take(iterator, 210)) < 210:
        ckpt.save(tmp_path / "last", data=iterator)
        # A new object: Grain's flat map, set to the end, repeats what it had in its hands.
        other = opened(make())
        ckpt.restore(tmp_path / "last", data=other)
        assert take(other, 1) == []


@pytest.mark.parametrize("shape", TRICKY_FIRST)
def test_at_every_position(shape: str, opened: Open) -> None:
    make = SHAPES[shape]
    iterator = opened(make())
    states: list[Any] = []
    elements: list[Any] = []
    for _ in range(16):
        states.append(ADAPTER.get_state(iterator))
        elements += take(iterator, 1)
    other = opened(make())
    for position, state in enumerate(states[:14]):
        ADAPTER.set_state(other, state)
        assert take(other, 2) == elements[position : position + 2], position


def test_no_data_at_all(tmp_path: Path, opened: Open) -> None:
    resumes(lambda: numbers(0).to_iter_dataset(READ), opened, tmp_path / "a", 1, 1)


NEW_PROCESS = """
import json, sys
import ckpt_core as ckpt
from tests.support import grain_pipelines
taken = {}
for shape in json.loads(sys.argv[2]):
    made = grain_pipelines.SHAPES[shape]()
    iterator = made.__iter__() if hasattr(made, "__iter__") else made
    ckpt.restore(sys.argv[1] + "/" + shape, data=iterator)
    taken[shape] = grain_pipelines.take(iterator, 6)
print(json.dumps(taken))
"""


def test_in_a_new_process(tmp_path: Path, opened: Open, run_python: Any) -> None:
    shapes = ["map, batch, repeat", "concat then split", "mix by name", "loader", "elastic"]
    expected: dict[str, Any] = {}
    for shape in shapes:
        iterator = opened(SHAPES[shape]())
        take(iterator, 5)
        ckpt.save(tmp_path / shape, data=iterator)
        expected[shape] = take(iterator, 6)
    assert run_python(NEW_PROCESS, str(tmp_path), json.dumps(shapes)) == expected


@pytest.mark.parametrize(
    "shape", ["thread prefetch", "threads", "device put", "map, batch, repeat"]
)
def test_the_position_is_that_of_the_consumer(shape: str, tmp_path: Path, opened: Open) -> None:
    iterator = opened(SHAPES[shape]())
    iterator.start_prefetch()
    seen = take(iterator, 5)
    _wait_for_threads(iterator)
    ckpt.save(tmp_path / "a", data=iterator)
    other = opened(SHAPES[shape]())
    ckpt.restore(tmp_path / "a", data=other)
    assert seen + take(other, 3) == take(opened(SHAPES[shape]()), 8)


def _wait_for_threads(iterator: Any) -> None:
    # A moment for the pipeline to run ahead of its consumer.
    threading.Event().wait(0.1)


def test_files_of_records(tmp_path: Path, opened: Open) -> None:
    writer = pytest.importorskip("array_record.python.array_record_module")
    path = str(tmp_path / "numbers.array_record")
    file = writer.ArrayRecordWriter(path, "group_size:1")
    for i in range(100):
        file.write(struct.pack("<q", i))
    file.close()

    def make() -> Any:
        source = grain.sources.ArrayRecordDataSource([path])
        dataset = grain.MapDataset.source(source).seed(1).shuffle()
        return dataset.map(lambda b: np.frombuffer(b, np.int64)).batch(4).to_iter_dataset(READ)

    resumes(make, opened, tmp_path / "a", 7, 12)


def test_tfrecords(tmp_path: Path, opened: Open) -> None:
    path = tmp_path / "numbers.tfrecord"
    with path.open("wb") as file:
        for i in range(60):  # length, its checksum, data, its checksum; Grain skips the checksums
            file.write(struct.pack("<QIqI", 8, 0, i, 0))

    def make() -> Any:
        dataset = gx.TFRecordIterDataset(str(path))
        return dataset.map(lambda b: np.frombuffer(b, np.int64)).batch(4)

    resumes(make, opened, tmp_path / "a", 4, 6)


@pytest.mark.parametrize("files", [1, 4])
def test_parquet(files: int, tmp_path: Path, opened: Open) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = [str(tmp_path / f"{k}.parquet") for k in range(files)]
    for k, path in enumerate(paths):
        table = arrow.table({"id": list(range(100 * k, 100 * k + 40))})
        parquet.write_table(table, path, row_group_size=15)

    def make() -> Any:
        parts = [gx.ParquetIterDataset(path) for path in paths]
        return gx.InterleaveIterDataset(parts, cycle_length=2).batch(4)

    resumes(make, opened, tmp_path / "a", 5, 8)


@pytest.mark.slow
def test_workers_that_have_not_started_yet(tmp_path: Path, opened: Open) -> None:
    # Fewer parts per worker than the cycle is long: the state that Grain gives before each worker
    # has produced something cannot be restored.
    def make() -> Any:
        dataset = gx.InterleaveIterDataset(parts(4, 60), cycle_length=4).batch(4)
        return opened(dataset.mp_prefetch(WORKERS))

    iterator = make()
    expected = []
    for consumed in range(2):
        ckpt.save(tmp_path / str(consumed), data=iterator)
        expected += take(iterator, 1)
    expected += take(iterator, 3)
    other = make()
    ckpt.restore(tmp_path / "1", data=other)
    assert take(other, 4) == expected[1:]
    ckpt.restore(tmp_path / "0", data=iterator)  # all of its workers are under way
    assert take(iterator, 4) == expected[:4]


class Own:
    """A reader of the user's own, whose state belongs to its process."""

    per_process = True

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("kind", ["grain", "proven", "own"])
def test_another_iterator_at_each_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """The one that training draws from is not saved: said once, and not of one that moves or of copies that move."""
    dataset = grain.MapDataset.range(100).to_iter_dataset()
    make = {
        "grain": lambda: iter(dataset),
        "proven": lambda: with_proof(iter(dataset)),
        "own": Own,
    }[kind]

    def moved(by: int) -> Any:
        data = make()
        if kind == "own":
            data.at = by
        else:
            for _ in range(by):
                next(data)
        return data

    training = make()
    with ckpt.Checkpointer(tmp_path, options=ckpt.Options(durable=False)) as checkpointer:
        for step in range(4):
            if kind == "own":
                training.at += 1
            else:
                next(training)
            checkpointer.save(step, data=training)
        for step in range(4, 8):
            checkpointer.save(step, data=moved(step))
        assert "another" not in caplog.text
        for step in range(8, 14):
            checkpointer.save(step, data=make())
    said = [record for record in caplog.records if "another" in record.getMessage()]
    assert len(said) == 1
    assert "data = iter(dataset) once" in said[0].getMessage()
