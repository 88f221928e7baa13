"""Grain pipelines of every shape go on with exactly the next element; and what is stored of them, in files that Grain reads too."""

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
    records,
    stream,
    take,
    two_of_three,
)
from tests.support.launch import launch, reports

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
    """From the first element, from the middle and, of data that ends, after the last."""
    make = SHAPES[shape]
    iterator, other = opened(make()), opened(make())
    ckpt.save(tmp_path / "first", data=iterator)
    begun = take(iterator, 7)
    ckpt.save(tmp_path / "middle", data=iterator)
    expected = take(iterator, 12)
    for name, elements in (("middle", expected), ("first", begun)):
        ckpt.restore(tmp_path / name, data=other)
        assert take(other, len(elements)) == elements
    ckpt.restore(tmp_path / "middle", data=iterator)
    assert take(iterator, 12) == expected
    if len(take(iterator, 100)) < 100:
        ckpt.save(tmp_path / "last", data=iterator)
        # A new object: Grain's flat map, set to the end, repeats what it had in its hands.
        other = opened(make())
        ckpt.restore(tmp_path / "last", data=other)
        assert take(other, 1) == []


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


class Odd(grain.DatasetIterator):
    """An iterator of a user's own, with all sorts of values in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []
        self.restored: Any = None

    def __next__(self) -> int:
        self.log.append(len(self.log))
        return len(self.log)

    def get_state(self) -> dict[str, Any]:
        return {
            "log": self.log,
            "int64": np.int64(2**60),
            "float32": np.float32(0.1),
            "array": np.arange(3, dtype=np.uint8),
            "bytes": b"\x00\xff",
            "none": None,
            "nested": ((1, (2.5, "x")), [True]),
            "empty": ((), [], {}),
            "by number": {0: "a", 10: "b", 2: "c"},
            "by text": {"0": "a"},
            "nan": float("inf"),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.log = list(state["log"])
        self.restored = state


def test_types_survive(tmp_path):
    iterator = Odd()
    take(iterator, 2)
    expected = ADAPTER.get_state(iterator)["grain"]
    ckpt.save(tmp_path / "a", data=iterator)
    other = Odd()
    ckpt.restore(tmp_path / "a", data=other)

    def typed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: typed(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value), [typed(item) for item in value]
        if isinstance(value, np.ndarray):
            return value.dtype, value.tolist()
        return type(value), value

    assert typed(other.restored) == typed(expected)


def test_a_value_that_cannot_be_stored_is_named(tmp_path):
    class Unclear(Odd):
        def get_state(self) -> dict[str, Any]:
            return {"here": {"it": [1, threading.Lock]}}

    with pytest.raises(ckpt.UnsupportedLeaf, match="here/it/1"):
        ckpt.save(tmp_path / "a", data=Unclear())
    assert not (tmp_path / "a").exists()


def test_a_live_list_is_stored_as_it_was(tmp_path):
    iterator = Odd()
    take(iterator, 3)
    pending = ckpt.save_async(tmp_path / "a", data=iterator)
    take(iterator, 100)
    pending.result()
    other = Odd()
    ckpt.restore(tmp_path / "a", data=other)
    assert other.log == [0, 1, 2]
    other.log.append(9)
    again = Odd()
    ckpt.restore(tmp_path / "a", data=again)
    assert again.log == [0, 1, 2]


def test_keys_of_shards_that_are_not_open_yet_are_numbers(tmp_path, opened):
    def make() -> Any:
        return opened(gx.InterleaveIterDataset(parts(5, 20), cycle_length=2))

    iterator = make()
    if not hasattr(iterator, "get_shard_states"):
        pytest.skip("this Grain sets no states of shards")
    shard_states = iterator.get_shard_states()
    shard_states[3] = {"exhausted": 0, "state": {"next_index": 15}}
    iterator.set_shard_states(shard_states)
    assert 3 in ADAPTER.get_state(iterator)["grain"]["future_states"]
    ckpt.save(tmp_path / "a", data=iterator)
    other = make()
    ckpt.restore(tmp_path / "a", data=other)
    expected = take(iterator, 200)
    assert take(other, 200) == expected


@pytest.mark.parametrize("shape", ["concat then split", "interleave", "mix", "loader"])
def test_text_of_grains_own_handler(shape, opened):
    def text_of(state: Any) -> str:
        return state.decode() if isinstance(state, bytes) else json.dumps(state, indent=4)

    iterator = opened(SHAPES[shape]())
    elements: list[Any] = []
    texts: list[str] = []
    for _ in range(20):
        texts.append(text_of(iterator.get_state()))
        assert ADAPTER.to_text(ADAPTER.get_state(iterator)) == texts[-1]
        elements += take(iterator, 1)
    other = opened(SHAPES[shape]())
    for position, text in enumerate(texts[:-1]):
        for _ in range(2):  # a state can be set twice, though Grain's interleave changes it
            ADAPTER.set_state(other, ADAPTER.from_text(other, text))
            assert take(other, 1) == elements[position : position + 1], position


def test_a_file_that_grain_cannot_write():
    # json refuses numpy's numbers; Grain's docstring recommends them.
    text = ADAPTER.to_text(ADAPTER.get_state(Odd()))
    assert json.loads(text)["int64"] == 2**60


@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_a_spoiled_position_is_found_and_the_step_before_is_taken(how, tmp_path, opened):
    make = SHAPES["map, batch, repeat"]
    iterator = opened(make())
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step in range(2):
            take(iterator, 2)
            checkpointer.save(step, model={"w": np.full(2, float(step))}, data=iterator)
        checkpointer.wait_until_finished()
        for file in (tmp_path / "1" / "data").rglob("process_*"):
            if how == "missing":
                file.unlink()
            else:
                file.write_bytes(file.read_bytes()[:-5])
        other = opened(make())
        with pytest.raises(ckpt.CheckpointCorrupt):
            checkpointer.restore(1, data=other)
        assert take(other, 1) == take(opened(make()), 1)
        with pytest.warns(RuntimeWarning, match="step 1 is damaged"):
            restored = checkpointer.restore_latest(model={"w": np.zeros(2)}, data=other)
    assert restored.step == 0
    assert np.array_equal(restored["model"]["w"], [0, 0])  # both of one step
    assert take(other, 2) == take(opened(make()), 4)[2:]


def test_several_iterators_and_only_one_of_them(tmp_path, opened):
    def make() -> dict[str, Any]:
        return {"train": opened(records().batch(2)), "valid": opened(records(90).batch(3))}

    iterators = make()
    take(iterators["train"], 4), take(iterators["valid"], 2)
    ckpt.save(tmp_path / "a", model={"w": np.ones(2)}, **iterators)
    expected = {name: take(iterator, 3) for name, iterator in iterators.items()}
    others = make()
    ckpt.restore(tmp_path / "a", **others)
    assert {name: take(iterator, 3) for name, iterator in others.items()} == expected
    single = make()["valid"]
    ckpt.restore(tmp_path / "a", valid=single)
    assert take(single, 3) == expected["valid"]
    assert np.array_equal(ckpt.load(tmp_path / "a", item="model")["w"], np.ones(2))
    with pytest.raises(ckpt.CheckpointNotFound, match="train"):
        ckpt.restore(tmp_path / "a", nothing=single)


@pytest.mark.parametrize("shape", ["concat then split", "loader", "mix", "elastic, iterated"])
def test_orbax_reads_ours_and_we_read_orbax(shape, tmp_path, opened):
    ocp = pytest.importorskip("orbax.checkpoint")
    make = SHAPES[shape]
    iterator = opened(make())
    take(iterator, 5)
    ckpt.save(tmp_path / "ours" / "0", data=iterator)
    with ocp.CheckpointManager(tmp_path / "theirs") as manager:
        manager.save(0, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
        manager.wait_until_finished()
    expected = take(iterator, 6)
    other = opened(make())
    ckpt.restore(tmp_path / "theirs" / "0", data=other)
    assert take(other, 6) == expected
    if shape == "concat then split":
        return  # Grain itself cannot restore it from a file: tuples become lists
    with ocp.CheckpointManager(tmp_path / "ours") as manager:
        manager.restore(0, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(other)))
    assert take(other, 6) == expected


# Runs in processes of jax.distributed.
COMMON = """
import grain
from grain import experimental as gx

def pipeline():
    shard = grain.MapDataset.range(1000).seed(3).shuffle()[index::count]
    return iter(shard.batch(3).to_iter_dataset())

def elastic():
    return gx.ElasticIterator(
        grain.MapDataset.range(960).seed(3).shuffle().repeat(), 24,
        grain.sharding.ShardOptions(index, count),
        read_options=grain.ReadOptions(num_threads=1, prefetch_buffer_size=2),
    )

def take(data, number):
    return [np.asarray(next(data)).tolist() for _ in range(number)]

def model(value):
    return {"w": put(np.full(8, value, np.float32))}
def weights(tree):
    return [np.asarray(shard.data).tolist() for shard in tree["w"].addressable_shards]
"""

SAVE = """
data, other = pipeline(), elastic()
shown = take(data, 2 + index)  # each is somewhere else
take(other, 2)
with ckpt.Checkpointer(f"{directory}/steps", options=options) as checkpointer:
    checkpointer.save(7, model=model(1.5), data=data, other=other)
report(shown=shown, follows=take(data, 3), others=take(other, 2))
"""

RESUME = """
data, other = pipeline(), elastic()
with ckpt.Checkpointer(f"{directory}/steps", options=options) as checkpointer:
    restored = checkpointer.restore_latest(model=model(0), data=data, other=other)
report(
    step=restored.step, weights=weights(restored["model"]), follows=take(data, 3),
    others=take(other, 2),
)
"""

ELSEWHERE = """
data, other = pipeline(), elastic()
with ckpt.Checkpointer(f"{directory}/steps", options=options) as checkpointer:
    refused = raised(lambda: checkpointer.restore_latest(model=model(0), data=data))
    without = checkpointer.restore_latest(model=model(0), other=other)
report(
    refused=refused, first=take(data, 1), weights=weights(without["model"]), others=take(other, 2)
)
"""


def joined(reports: list[dict[str, list[list[int]]]]) -> list[list[int]]:
    """The elements of each global batch, whatever process got them."""
    rounds = zip(*(one["others"] for one in reports), strict=True)
    return [sorted(element for part in parts for element in part) for parts in rounds]


@pytest.mark.parametrize(("saved", "now"), [(2, 4), (4, 2)])
def test_a_state_for_each_process(tmp_path, saved, now):
    directory = tmp_path / "run"
    first = reports(launch(COMMON + SAVE, directory, processes=saved, devices=4 // saved))
    names = [f"process_{index}-of-{saved}.json" for index in range(saved)]
    folder = directory / "steps/7/data"
    assert sorted(file.name for file in folder.glob("process_*")) == names
    texts = {(folder / name).read_text() for name in names}
    assert len(texts) == saved  # the positions differ

    again = reports(launch(COMMON + RESUME, directory, processes=saved, devices=4 // saved))
    for before, after in zip(first, again, strict=True):
        assert after["step"] == 7
        assert after["follows"] == before["follows"] and after["others"] == before["others"]
        assert after["weights"] == [[1.5, 1.5]] * (4 // saved)

    elsewhere = reports(launch(COMMON + ELSEWHERE, directory, processes=now, devices=4 // now))
    for one in elsewhere:
        assert one["refused"]["type"] == "StructureMismatch", one["refused"]
        assert f"saved {saved}, wanted {now}" in one["refused"]["text"]
        assert "ElasticIterator" in one["refused"]["text"]  # what to do
        assert one["refused"]["secs"] < 20
        assert one["weights"] == [[1.5, 1.5]] * (4 // now)  # the rest can be had without it
    # the refused pipelines were not moved
    starts = sorted(element for one in elsewhere for element in one["first"][0])
    assert len(starts) == len(set(starts)) == 3 * now
    # an elastic pipeline goes on with the same global batches
    assert joined(elsewhere) == joined(first)
