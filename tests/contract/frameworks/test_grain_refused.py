"""Grain pipelines that were changed since the save: refused, or proven to be the same."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
import pytest
from grain import python as gp

import ckpt_core as ckpt
from ckpt_grain import ADAPTER, ignore_pipeline_changes, with_proof
from tests.support import grain_pipelines as pipelines
from tests.support.grain_pipelines import loader, make_opened, numbers, record, records, take  # noqa: F401 (fixture)


@pytest.mark.parametrize("shape", ["map, batch, repeat", "window shuffle", "loader"])
def test_a_proof_changes_nothing_else(shape, tmp_path, opened):
    make = pipelines.SHAPES[shape]
    expected = take(opened(make()), 20)
    iterator = with_proof(opened(make()))
    seen = take(iterator, 7)
    for name in "ab":  # saving looks ahead, twice at the same
        ckpt.save(tmp_path / name, data=iterator)
    seen += take(iterator, 13)
    assert seen == expected
    other = with_proof(opened(make()))
    take(other, 2)
    ckpt.restore(tmp_path / "b", data=other)
    assert take(other, 6) == expected[7:13]
    plain_iterator = opened(make())
    ckpt.restore(tmp_path / "a", data=plain_iterator)
    assert take(plain_iterator, 6) == expected[7:13]


OFFSET = 0


def shifted(i: Any) -> int:
    return int(i) + OFFSET


def test_other_data_is_found_by_the_proof(tmp_path, opened, monkeypatch):
    def make() -> Any:
        return opened(numbers().map(shifted).batch(4).to_iter_dataset(pipelines.READ))

    iterator = with_proof(make())
    take(iterator, 3)
    ckpt.save(tmp_path / "a", weights=np.ones(2), data=iterator)
    monkeypatch.setattr(sys.modules[__name__], "OFFSET", 1)  # no description shows it
    ckpt.restore(tmp_path / "a", data=make())
    other = with_proof(make())
    with pytest.raises(ckpt.StructureMismatch, match="next element") as caught:
        ckpt.restore(tmp_path / "a", data=other)
    assert "Restore into the iterator without with_proof to accept it" in str(caught.value)


def test_proof_of_the_end_and_of_nothing(tmp_path, opened):
    def make(count: int = 8) -> Any:
        return opened(grain.MapDataset.source([{"t": "x" * i} for i in range(count)]))

    iterator = with_proof(make())
    take(iterator, 8)
    ckpt.save(tmp_path / "end", data=iterator)
    other = with_proof(make())
    ckpt.restore(tmp_path / "end", data=other)
    assert take(other, 1) == []
    longer = with_proof(ignore_pipeline_changes(make(9)))
    with pytest.raises(ckpt.StructureMismatch, match="saved end, wanted"):
        ckpt.restore(tmp_path / "end", data=longer)
    plain_iterator = make()
    take(plain_iterator, 2)
    ckpt.save(tmp_path / "plain", data=plain_iterator)
    ckpt.restore(tmp_path / "plain", data=other)
    assert len(take(other, 10)) == 6


def test_a_proof_is_no_way_around_the_description(tmp_path, opened):
    ckpt.save(tmp_path / "a", data=with_proof(opened(records().batch(8))))
    with pytest.raises(ckpt.StructureMismatch, match="batch_size"):
        ckpt.restore(tmp_path / "a", data=with_proof(opened(records().batch(4))))
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"iter\(\.\.\.\)"):
        with_proof(records())


@dataclasses.dataclass
class Scale(grain.transforms.Map):
    """Its arguments count, and nothing that its use fills in."""

    factor: float
    words: Any = None
    known: dict[int, int] = dataclasses.field(default_factory=dict)
    calls: int = dataclasses.field(default=0, init=False)

    def map(self, element: Any) -> Any:
        self.words = self.words or object()
        self.known[int(element)] = self.calls = self.calls + 1
        return element * self.factor


def row(i: Any) -> dict[str, Any]:
    return {"row": np.full(3, int(i))}


def whole(dataset: grain.MapDataset) -> grain.IterDataset:
    return dataset.batch(8).to_iter_dataset(pipelines.READ)


def mixed(count: int) -> grain.IterDataset:
    parts = [pipelines.stream(seed=k) for k in range(count)]
    return grain.IterDataset.mix(parts, weights=[1 / count] * count)


Make = Callable[[], Any]
CHANGES: dict[str, tuple[Make, Make, str]] = {
    name: (lambda: whole(records()), make, text)
    for name, make, text in (
        (
            "batch size",
            lambda: records().batch(4).to_iter_dataset(pipelines.READ),
            "batch_size=8.*batch_s",
        ),
        ("seed", lambda: whole(records(seed=2)), "seed"),
        ("length", lambda: whole(records(700)), "length=200.*length=700"),
        (
            "another step",
            lambda: whole(records().random_map(pipelines.jitter, seed=1)),
            "RandomMapMapDataset",
        ),
        ("a step less", lambda: whole(numbers().seed(1).shuffle()), "saved MapMapDataset"),
        (
            "another function",
            lambda: whole(numbers().seed(1).shuffle().map(row)),
            "transform=record.*transform=row",
        ),
        ("iterator of another kind", lambda: pipelines.stream().batch(8), "Batch"),
    )
} | {
    "argument": (
        lambda: whole(numbers().map(Scale(2.0))),
        lambda: whole(numbers().map(Scale(3.0))),
        r"factor=2\.0.*factor=3\.0",
    ),
    "source": (
        lambda: whole(grain.MapDataset.source(pipelines.Numbers(200))),
        lambda: whole(grain.MapDataset.source(pipelines.Numbers(300))),
        "source=Numbers.*200.*Numbers.*300",
    ),
    "mixture": (lambda: mixed(2), lambda: mixed(3), "MixedDatasetIterator"),
}


class Files:
    """A source that holds names: given, found by itself, or those of a source in it."""

    def __init__(self, names: Any, inside: Any = None) -> None:
        self.found = list(names)
        self.inside = inside

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(index)

    def __repr__(self) -> str:
        return "Files"


NAMES = [f"/data/{n}.arrow" for n in "abcd"]
MADE: dict[str, Callable[[Any], Any]] = {
    "list": grain.MapDataset.source,
    "tuple of pairs": lambda names: grain.MapDataset.source([(name, 1) for name in names]),
    "of its own": lambda names: grain.MapDataset.source(Files(names)),
    "in another": lambda names: grain.MapDataset.source(Files("", Files(names))),
    "array": lambda names: grain.MapDataset.source(np.array(names)),
    "objects": lambda names: grain.MapDataset.source(np.array(names, object)),
    "mixed": lambda names: grain.MapDataset.mix(
        [numbers(4), grain.MapDataset.source(Files(names))], weights=[0.5, 0.5]
    ),
    "loader": lambda names: loader(source=Files(names)),
}


@pytest.mark.parametrize("how", MADE)
def test_other_files_are_refused(how, tmp_path, opened):
    def make(names: Any) -> Any:
        made = MADE[how](names)
        return opened(made if how == "loader" else made.to_iter_dataset(pipelines.READ))

    data = make(NAMES)
    with ckpt.Checkpointer(tmp_path / "run", asynchronous=False) as run:
        assert run.restore_latest(data=data) is None
        take(data, 2)
        run.save(0, data=data)
    for other in (NAMES[::-1], [*NAMES[:3], "/data/z.arrow"]):
        with pytest.raises(
            ckpt.StructureMismatch, match="content differs: saved digest"
        ) as refused:
            ckpt.restore(tmp_path / "run/0", data=make(other))
        assert "ignore_pipeline_changes" in str(refused.value)
        ckpt.restore(tmp_path / "run/0", data=ignore_pipeline_changes(make(other)))
    ckpt.restore(tmp_path / "run/0", data=make(NAMES))
    if how not in ("array", "tuple of pairs"):  # elsewhere, the same files
        ckpt.restore(tmp_path / "run/0", data=make([name.replace("data", "d/x") for name in NAMES]))


def test_records_may_be_changed_by_what_uses_them(tmp_path, opened):
    def make() -> Any:
        samples = [{"text": name} for name in NAMES]
        return opened(grain.MapDataset.source(samples).map(lambda one: one.setdefault("n", 1)))

    data = make()
    take(data, 2)
    ckpt.save(tmp_path / "a", data=data)
    ckpt.restore(tmp_path / "a", data=make())


def test_of_a_source_in_use_what_it_was_given_counts(tmp_path, opened):
    @dataclasses.dataclass
    class Given(Files):
        names: list[str]
        seen: list[int] = dataclasses.field(default_factory=list, init=False)

        def __getitem__(self, index: int) -> int:
            self.seen.append(int(index))
            return int(index)

    data = opened(grain.MapDataset.source(Given(NAMES)))
    take(data, 2)
    ckpt.save(tmp_path / "a", data=data)
    ckpt.restore(tmp_path / "a", data=opened(grain.MapDataset.source(Given(NAMES))))
    with pytest.raises(ckpt.StructureMismatch, match="content differs"):
        ckpt.restore(tmp_path / "a", data=opened(grain.MapDataset.source(Given(NAMES[::-1]))))


def test_functions_are_their_names_also_as_earlier_versions_described_them(opened):
    def make(function: Any) -> Any:
        return opened(numbers().map(function).map(lambda i, k=3: i))

    state = ADAPTER.get_state(make(record))
    described = state["pipeline"]
    described["lines"] = [
        line.replace("record", "record [code 0123456789ab]").replace(
            "<lambda>", "<lambda> [code 0123456789ab](k=3)"
        )
        for line in described["lines"]
    ]
    assert "[code" in str(described["lines"])
    described |= {"python": "cpython-311", "digest": "x", "digest_of_names": "x"}
    del described["sources"]
    ADAPTER.set_state(make(record), state)
    with pytest.raises(ckpt.StructureMismatch, match=r"record.*row"):
        ADAPTER.set_state(make(row), state)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_pipeline_is_refused(change, tmp_path, opened):
    make, changed, expected = CHANGES[change]
    iterator = opened(make())
    take(iterator, 3)
    ckpt.save(tmp_path / "a", data=iterator)
    other = opened(changed())
    take(other, 1)
    before = other.get_state()
    with pytest.raises(ckpt.StructureMismatch, match=expected) as caught:
        ckpt.restore(tmp_path / "a", data=other)
    assert "ignore_pipeline_changes" in str(caught.value)
    assert other.get_state() == before
    again = opened(make())
    ckpt.restore(tmp_path / "a", data=again)
    assert take(again, 1) == take(iterator, 1)
    if change == "length":
        ckpt.restore(tmp_path / "a", data=ignore_pipeline_changes(other))
        assert other.get_state() == {"next_index": 3}


def test_what_its_use_fills_is_no_change(tmp_path, opened):
    """Three attempts at the loop of the README, each from what the one before saved in use."""
    straight = take(opened(whole(numbers().map(Scale(2.0)))), 8)
    for start in (0, 3, 6):
        data = opened(whole(numbers().map(Scale(2.0))))
        with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
            restored = checkpointer.restore_latest(data=data)
            assert (restored.step + 1 if restored else 0) == start
            for step in range(start, min(start + 3, 8)):
                assert take(data, 1) == straight[step : step + 1]
                checkpointer.save(step, data=data)


def test_what_only_changes_the_speed_is_no_change(tmp_path, opened):
    def make(**options: int) -> Any:
        return opened(records().batch(8).to_iter_dataset(grain.ReadOptions(**options)))

    ckpt.save(tmp_path / "a", data=make(num_threads=1, prefetch_buffer_size=2))
    ckpt.restore(tmp_path / "a", data=make(num_threads=4, prefetch_buffer_size=30))


def test_another_version_of_grain_is_reported(opened):
    iterator = opened(pipelines.SHAPES["mix"]())
    state = ADAPTER.get_state(iterator)
    state["pipeline"]["grain"] = "0.0.1"
    with pytest.warns(UserWarning, match=r"0\.0\.1"):
        ADAPTER.set_state(iterator, state)


@pytest.mark.parametrize("wrap", [lambda data: data, with_proof, ignore_pipeline_changes])
def test_another_number_of_processes_is_never_waved_through(wrap, opened):
    state = ADAPTER.get_state(opened(numbers()))
    state["pipeline"]["processes"] = 2
    data = wrap(opened(numbers()))
    with pytest.raises(ckpt.StructureMismatch, match="saved 2, wanted 1") as refused:
        ADAPTER.set_state(data, state)
    text = str(refused.value)
    assert "ignore_pipeline_changes" not in text  # which would be refused as well
    assert "as many processes as saved it" in text and "begin the data anew" in text
    assert "ElasticIterator" in text and "unexpected='ignore'" in text
    assert take(data, 1) == take(opened(numbers()), 1)  # nothing was moved


@pytest.mark.parametrize("now", [1, 4])
def test_elastic_iterators_go_on_in_another_number_of_processes(now, tmp_path):
    def ids(iterators: list[Any], steps: int) -> list[int]:
        return [int(i) for _ in range(steps) for it in iterators for i in next(it)["id"]]

    before = [pipelines.elastic(k, 2) for k in range(2)]
    seen = ids(before, 3)
    ckpt.save(tmp_path / "a", data=before[0])
    after = [pipelines.elastic(k, now) for k in range(now)]
    for iterator in after:
        ckpt.restore(tmp_path / "a", data=iterator)
    seen += ids(after, 4)
    assert len(set(seen)) == len(seen)
    assert sorted(seen) == sorted(ids([pipelines.elastic(0, 1)], 7))


def test_loader_with_another_number_of_workers_is_refused(tmp_path, opened):
    operations = (pipelines.ToRecord(), grain.transforms.Batch(4))
    ckpt.save(tmp_path / "a", data=opened(loader(*operations)))
    other = opened(loader(*operations, workers=2))
    with pytest.raises(ckpt.StructureMismatch, match=r"worker_count=0.*worker_count=2"):
        ckpt.restore(tmp_path / "a", data=other)
    with pytest.raises(ValueError, match="Worker count"):  # Grain's own check
        ckpt.restore(tmp_path / "a", data=ignore_pipeline_changes(other))


class Nameless(pipelines.Numbers):
    __repr__ = object.__repr__


class Hoard(gp.Operation):
    """Keeps elements back, which Grain's state knows nothing about."""

    def __call__(self, elements: Iterator[Any]) -> Iterator[Any]:
        yield from list(elements)


def test_what_will_not_resume_is_reported_at_the_save(tmp_path, opened):
    with pytest.warns(UserWarning, match="Nameless.*__repr__"):
        ckpt.save(tmp_path / "a", data=opened(loader(source=Nameless())))
    iterator = opened(loader(Hoard(), epochs=1))
    with pytest.warns(UserWarning, match="Hoard"):
        ckpt.save(tmp_path / "b", data=iterator)
    ckpt.save(tmp_path / "c", data=iterator)  # warned of once


def test_a_closed_iterator_is_refused(tmp_path, opened):
    for shape in ("map, batch, repeat", "loader"):
        iterator = opened(pipelines.SHAPES[shape]())
        take(iterator, 1)
        getattr(iterator, "_iterator", iterator).close()
        with pytest.raises(ckpt.CheckpointError, match="closed"):
            ckpt.save(tmp_path / "a", data=iterator)
    assert not (tmp_path / "a").exists()


def test_iterators_inside_a_container_are_refused(tmp_path, opened):
    with pytest.raises(ckpt.UnsupportedLeaf, match="an item of its own"):
        ckpt.save(tmp_path / "a", data={"train": opened(records())})


def test_datasets_and_generators_are_refused(tmp_path):
    for made in (records(), pipelines.stream(), loader()._data_loader):
        with pytest.raises(ckpt.UnsupportedLeaf):
            ckpt.save(tmp_path / "a", data=made)
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"iter\(\.\.\.\)"):
        ckpt.save(tmp_path / "a", data=pipelines.stream())
    with pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.save(tmp_path / "a", data=map(pipelines.plain, pipelines.stream()))
    assert not (tmp_path / "a").exists()
