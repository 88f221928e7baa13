"""Grain pipelines of every shape go on with exactly the next element."""

import itertools
import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from grain import experimental as gx

import ckpt_core as ckpt
from ckpt_grain import ADAPTER, with_proof
from tests.support import grain_pipelines
from tests.support.grain_pipelines import (
    BINS,
    READ,
    SHAPES,
    Jitter,
    Open,
    ToRecord,
    elastic,
    loader,
    make_opened,  # noqa: F401 (fixtures)
    numbers,
    packed,
    parts,
    record,
    stream,
    take,
    two_of_three,
)

WORKERS = grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=2)


WITH_WORKERS: dict[str, Callable[[], Any]] = {
    "filter": lambda: stream().filter(two_of_three).batch(8).mp_prefetch(WORKERS),
    "then window": lambda: gx.WindowShuffleIterDataset(
        stream().mp_prefetch(WORKERS), window_size=17, seed=5
    ).batch(4),
    "packing": lambda: packed(gx.FirstFitPackIterDataset, **BINS).mp_prefetch(WORKERS),
    "interleave": lambda: (
        gx.InterleaveIterDataset(parts(12, 60), cycle_length=4).batch(4).mp_prefetch(WORKERS)
    ),
    "elastic": lambda: elastic(1, 2, multiprocessing_options=WORKERS),
    "loader": lambda: loader(ToRecord(), Jitter(), grain.transforms.Batch(4), workers=2),
}


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


@pytest.mark.parametrize("shape", SHAPES)
def test_goes_on_exactly(shape, tmp_path, opened):
    resumes(SHAPES[shape], opened, tmp_path / "a", 7, 12)


@pytest.mark.parametrize(
    ("shape", "consumed"),
    [
        pytest.param("filter", 5, marks=pytest.mark.always),
        ("then window", 1),
        ("packing", 5),
        ("interleave", 1),
        ("elastic", 5),
        ("loader", 1),
    ],
)
def test_goes_on_exactly_with_workers(shape, consumed, tmp_path, opened):
    resumes(WITH_WORKERS[shape], opened, tmp_path / "a", consumed, 8)


@pytest.mark.parametrize("shape", SHAPES)
def test_from_the_first_element_and_after_the_last(shape, tmp_path, opened):
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


@pytest.mark.parametrize("shape", SHAPES)
def test_at_every_position(shape, opened):
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


def test_no_data_at_all(tmp_path, opened):
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


@pytest.mark.always
def test_in_a_new_process(tmp_path, opened, run_python):
    shapes = ["map, batch, repeat", "concat then split", "mix by name", "loader", "elastic"]
    expected: dict[str, Any] = {}
    for shape in shapes:
        iterator = opened(SHAPES[shape]())
        take(iterator, 5)
        ckpt.save(tmp_path / shape, data=iterator)
        expected[shape] = take(iterator, 6)
    assert run_python(NEW_PROCESS, str(tmp_path), json.dumps(shapes)) == expected


@pytest.mark.parametrize(
    ("shape", "records_of_6_batches"),
    [("thread prefetch", 36), ("threads", 24), ("device put", 24), ("map, batch, repeat", 48)],
)
def test_the_position_is_that_of_the_consumer(
    shape, records_of_6_batches, tmp_path, opened, monkeypatch
):
    made, ahead = itertools.count(1), threading.Event()

    def counted(i: Any) -> Any:
        if next(made) == records_of_6_batches:
            ahead.set()
        return record(i)

    monkeypatch.setattr(grain_pipelines, "record", counted)
    iterator = opened(SHAPES[shape]())
    iterator.start_prefetch()
    seen = take(iterator, 5)
    assert ahead.wait(60)  # the pipeline runs ahead of its consumer
    ckpt.save(tmp_path / "a", data=iterator)
    other = opened(SHAPES[shape]())
    ckpt.restore(tmp_path / "a", data=other)
    assert seen + take(other, 3) == take(opened(SHAPES[shape]()), 8)


def test_files_of_records(tmp_path, opened):
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


def test_workers_that_have_not_started_yet(tmp_path, opened):
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


@pytest.mark.parametrize("wrap", [lambda data: data, with_proof])
def test_another_iterator_at_each_save(tmp_path, caplog, wrap):
    """The one that training draws from is not saved: said once, and not of one that moves or of copies that move."""
    dataset = grain.MapDataset.range(100).to_iter_dataset()

    def moved(by: int) -> Any:
        data = wrap(iter(dataset))
        take(data, by)
        return data

    training = moved(0)
    with ckpt.Checkpointer(tmp_path, options=ckpt.Options(durable=False)) as checkpointer:
        for step in range(4):
            take(training, 1)
            checkpointer.save(step, data=training)
        for step in range(4, 8):
            checkpointer.save(step, data=moved(step))
        assert "another" not in caplog.text
        for step in range(8, 14):
            checkpointer.save(step, data=moved(0))
    said = [record for record in caplog.records if "another" in record.getMessage()]
    assert len(said) == 1
    assert "data = iter(dataset) once" in said[0].getMessage()
