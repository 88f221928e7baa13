"""`ckpt.Replayed`: a stream of batches without a state, made anew and moved on to where it stood."""

import logging
import threading
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports
from tests.support.places import Place, make_place, open_at  # noqa: F401 (fixture)

LENGTH = 5
NOT_DURABLE = ckpt.Options(durable=False)


def make_batches(seed: int = 0, length: int = LENGTH) -> Iterator[dict[str, Any]]:
    """Batches of everything that has a digest; the buffer of an array is used again, as loaders do."""
    numbers, buffer = np.random.default_rng(seed), np.empty(3)
    for place in range(length):
        buffer[:] = numbers.normal(size=3)
        yield {"x": buffer, "place": place, "names": ["a", f"b{place}"], "nested": ({"y": place},)}


def taken(data: Any, count: int) -> list[Any]:
    return [next(data)["x"].copy() for _ in range(count)]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("count", [0, 1, LENGTH - 1, LENGTH, LENGTH + 3, 2 * LENGTH])
def test_it_goes_on_where_it_stood(place, count, used):
    """At every place of two epochs, also in one that stood elsewhere; `for` at the end begins the next epoch."""

    def batches_of(data: ckpt.Replayed[Any]) -> Iterator[Any]:
        while data.epoch < 3:
            for batch in data:
                yield (data.epoch, data.batches, batch["x"].tolist())

    data = ckpt.Replayed(make_batches_of_epoch)
    whole = [*batches_of(ckpt.Replayed(make_batches_of_epoch))]
    assert len(whole) == 3 * LENGTH and whole[0][2] != whole[LENGTH][2]
    going = batches_of(data)
    before = [next(going) for _ in range(count)]
    with ckpt.Checkpointer(place.url, options=NOT_DURABLE) as run:
        run.save(count, data=data)
    if used:
        next(going)
    else:
        data = ckpt.Replayed(make_batches_of_epoch)
    with ckpt.Checkpointer(place.url, options=NOT_DURABLE) as run:
        restored = run.restore_latest(data=data)
    assert restored is not None and restored["data"] is data
    assert [*before, *batches_of(data)] == whole


def make_batches_of_epoch(epoch: int) -> Iterator[dict[str, Any]]:
    return make_batches(epoch)


def test_at_the_end_it_stays_until_somebody_begins_anew(tmp_path):
    data = ckpt.Replayed(make_batches)
    assert len([*data]) == LENGTH
    ckpt.save(tmp_path / "end", data=data)
    again = ckpt.Replayed(make_batches)
    ckpt.restore(tmp_path / "end", data=again)
    for one in (data, again):
        assert next(one, "end") == next(one, "end") == "end"
        assert (one.epoch, one.batches) == (1, 0)
        assert len([*one]) == LENGTH


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: make_batches(1), "batch 3 of epoch 0: digest differs"),
        (lambda: make_batches(0, 2), r"batch 3 of epoch 0: length .* wanted 2 batches in all"),
    ],
)
def test_other_batches_are_refused(tmp_path, make, match):
    """The object stays as it was; what the message says works."""
    data, other = ckpt.Replayed(make_batches), ckpt.Replayed(make)
    taken(data, 3)
    taken(other, 1)
    with ckpt.Checkpointer(tmp_path, options=NOT_DURABLE) as run:
        run.save(3, data=data, model={"w": np.ones(2)})
    with ckpt.Checkpointer(tmp_path, options=NOT_DURABLE) as run:
        with pytest.raises(ckpt.StructureMismatch, match=match) as refused:
            run.restore_latest(data=other, model={"w": np.ones(2)})
        assert "seed" in str(refused.value) and other.batches == 1
    with ckpt.Checkpointer(tmp_path, options=NOT_DURABLE) as run:
        restored = run.restore_latest(model={"w": np.ones(2)}, unexpected="ignore")
        assert restored and restored["model"]["w"].tolist() == [1, 1]
        assert run.save(4, data=other, model={"w": np.ones(2)})


def test_a_function_that_gives_one_stream_again_is_refused(tmp_path):
    data, stream = ckpt.Replayed(make_batches), make_batches()
    taken(data, 2)
    ckpt.save(tmp_path / "two", data=data)
    other = ckpt.Replayed(lambda: stream)
    taken(other, 1)
    with pytest.raises(ckpt.CheckpointError, match="gave the same generator as before"):
        ckpt.restore(tmp_path / "two", data=other)
    with pytest.raises(TypeError, match=r"write ckpt\.Replayed"):
        ckpt.Replayed(stream)
    ckpt.save(tmp_path / "tree", data={"epoch": 0})
    with pytest.raises(ckpt.StructureMismatch, match="wanted Replayed"):
        ckpt.restore(tmp_path / "tree", data=data)


class Odd:
    """An object that has no digest."""


@dataclass
class Batch:
    """As a program has them."""

    x: Any


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": np.ones(2)}, {"x": np.ones((2, 1))}),
        ({"x": np.ones(2)}, {"x": np.ones(2, np.float32)}),
        ({"x": np.ones(2)}, {"y": np.ones(2)}),
        ([1, 2], (1, 2)),
        (1, True),
        ("a", b"a"),
        ([jnp.ones(2)], [jnp.zeros(2)]),
        (jax.random.key(0), jax.random.key(1)),
        (UserDict(x=[1.0, None]), UserDict(x=[1.5, None])),
        (Batch(np.int8(1)), Batch(np.int8(2))),
        (np.array(["a", "bb"]), np.array(["a", "bc"])),
        (None, 0),
        ({"odd": Odd(), "x": 1}, {"odd": Odd(), "x": 2}),
    ],
)
def test_what_a_batch_may_hold(tmp_path, one, other):
    ckpt.save(tmp_path / "a", data=_after_one(one))
    ckpt.restore(tmp_path / "a", data=ckpt.Replayed(lambda: [one]))
    with pytest.raises(ckpt.StructureMismatch, match="digest"):
        ckpt.restore(tmp_path / "a", data=ckpt.Replayed(lambda: [other]))


def _after_one(batch: Any) -> ckpt.Replayed[Any]:
    data = ckpt.Replayed(lambda: [batch])
    next(data)
    return data


def test_what_has_no_digest_is_said(tmp_path, caplog):
    data = ckpt.Replayed(lambda: [{"x": 1, "odd": Odd()}] * 3)
    assert len([*data]) == 3
    (record,) = caplog.records
    assert "leaves out odd, an Odd" in record.getMessage()
    donated = _after_one(gone := jnp.ones(2))
    gone.delete()
    ckpt.save(tmp_path / "a", data=donated)
    ckpt.restore(tmp_path / "a", data=ckpt.Replayed(lambda: [jnp.zeros(2)]))
    assert "was not compared" in caplog.records[-1].getMessage()


def test_torch(tmp_path):
    torch = pytest.importorskip("torch")
    numbers = torch.arange(12).to(torch.bfloat16).reshape(6, 2)
    dataset = torch.utils.data.TensorDataset(numbers)

    def loader(seed: int = 0) -> Any:
        drawn = torch.Generator().manual_seed(seed)
        return torch.utils.data.DataLoader(dataset, 2, shuffle=True, generator=drawn)

    data, again = ckpt.Replayed(loader), ckpt.Replayed(loader)
    next(data)
    ckpt.save(tmp_path / "a", data=data)
    ckpt.restore(tmp_path / "a", data=again)
    assert torch.equal(next(data)[0], next(again)[0])
    with pytest.raises(ckpt.StructureMismatch, match="digest"):
        ckpt.restore(tmp_path / "a", data=ckpt.Replayed(lambda: loader(1)))


def test_how_long_it_took_is_told(tmp_path, caplog):
    data = ckpt.Replayed(make_batches)
    taken(data, 3)
    ckpt.save(tmp_path / "a", data=data)
    with caplog.at_level(logging.INFO, "ckpt_core"):
        ckpt.restore(tmp_path / "a", data=data)
    assert "taken and dropped 3 batches of epoch 0 again" in caplog.text


@pytest.mark.parametrize("error", [OSError("the network is away"), KeyboardInterrupt()])
def test_a_stream_that_raised_is_made_anew(error):
    """A generator that has raised would look like one at its end."""
    failing = [error]

    def make() -> Iterator[Any]:
        for place, batch in enumerate(make_batches()):
            if place == 2 and failing:
                raise failing.pop()
            yield batch

    data = ckpt.Replayed(make)
    before = taken(data, 2)
    with pytest.raises(type(error)):
        next(data)
    found = [*before, *taken(data, 3)]
    assert np.array_equal(found, taken(ckpt.Replayed(make_batches), 5))


def test_threads_that_run_ahead_inside_of_it(tmp_path):
    """What they have made and nobody has taken comes again."""

    def ahead() -> Iterator[Any]:
        made = list[Any]()
        thread = threading.Thread(target=lambda: made.extend(dict(b) for b in make_batches()))
        thread.start()
        thread.join()
        yield from ({**batch, "x": np.array([batch["place"]])} for batch in made)

    data, again = ckpt.Replayed(ahead), ckpt.Replayed(ahead)
    taken(data, 2)
    ckpt.save(tmp_path / "a", data=data)
    ckpt.restore(tmp_path / "a", data=again)
    assert next(again)["place"] == 2


def test_threads_take_turns():
    data, found = ckpt.Replayed(lambda: make_batches(length=400)), list[int]()

    def take() -> None:
        while batch := next(data, None):
            found.append(batch["place"])

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [*range(400)]


PROCESSES = """
def make():
    return (put(np.full(4, place)) if place % 2 else np.array([index, place]) for place in range(9))
data, odd = ckpt.Replayed(make), []
for _ in range(4 + index):
    next(data)
with ckpt.Checkpointer(directory, options=options) as run:
    if not run.all_steps():
        run.save(0, data=data)
    else:
        data = ckpt.Replayed(make)
        run.restore_latest(data=data)
report(batches=data.batches, next=np.asarray(jax.tree.leaves(next(data))[0].addressable_data(0)
    if data.batches % 2 else next(data)).ravel().tolist()[-1])
"""


def test_each_process_has_its_own_place(tmp_path):
    for _ in range(2):
        told = reports(launch(PROCESSES, tmp_path / "run"))
        assert [one["batches"] for one in told] == [4, 5]
    with pytest.raises(ckpt.CheckpointError, match="as many processes"):
        ckpt.restore(tmp_path / "run" / "0", data=ckpt.Replayed(make_batches))
