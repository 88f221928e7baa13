"""What one of the two libraries wrote is the same to a program on the other one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ckpt_orbax import v1 as ours
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)

theirs = pytest.importorskip("orbax.checkpoint.experimental.v1")

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

BOTH = [(ours, ours), (ours, theirs), (theirs, ours), (theirs, theirs)]
NAMES = ["ours, ours", "ours, theirs", "theirs, ours", "theirs, theirs"]
STATE = {"w": np.ones(2)}

both = pytest.mark.parametrize(("writer", "reader"), BOTH, ids=NAMES)


class Words:
    def __init__(self, words):
        self.words = words


class WordsHandler:
    async def save(self, directory, checkpointable):
        async def write():
            path = await directory.await_creation()
            (path / "words.json").write_text(json.dumps(checkpointable.words))

        return write()

    async def load(self, directory, abstract_checkpointable=None):
        async def read():
            return Words(json.loads((directory / "words.json").read_text()))

        return read()

    async def metadata(self, directory):
        return len(json.loads((directory / "words.json").read_text()))

    def is_handleable(self, checkpointable):
        return isinstance(checkpointable, Words)

    def is_abstract_handleable(self, abstract_checkpointable):
        return None


class Counter:
    def __init__(self, count=0):
        self.count = count

    async def save(self, directory):
        async def write():
            (await directory.await_creation() / "count").write_text(str(self.count))

        return write()

    async def load(self, directory):
        async def read():
            self.count = int((directory / "count").read_text())

        return read()


def with_words(library):
    registry = library.handlers.local_registry()
    registry.add(WordsHandler)
    chosen = library.options.CheckpointablesOptions(registry=registry)
    return library.Context(checkpointables_options=chosen)


@both
def test_a_handler_loads_its_items_without_a_target(writer, reader, tmp_path):
    """Orbax loaded a list of the files in place of the object, without a word."""
    with with_words(writer):
        writer.save_checkpointables(tmp_path / "x", {"m": STATE, "words": Words(["a", "b"])})
    with with_words(reader):
        loaded = reader.load_checkpointables(tmp_path / "x")
        described = reader.checkpointables_metadata(tmp_path / "x").metadata["words"]
    assert loaded["words"].words == ["a", "b"]
    assert described == 2


def test_an_object_that_loads_itself_is_wanted(tmp_path):
    recorded = []
    for writer in (ours, theirs):
        path = tmp_path / writer.__name__
        writer.save_checkpointables(path, {"m": STATE, "counter": Counter(3)})
        text = (path / "_CHECKPOINT_METADATA").read_text()
        recorded.append(json.loads(text)["item_handlers"]["counter"])
        with pytest.raises(ValueError, match="you must pass an instance of the object"):
            ours.load_checkpointables(path)
        for reader in (ours, theirs):
            counter = Counter()
            reader.load_checkpointables(path, {"counter": counter})
            assert counter.count == 3
    assert recorded[0] == recorded[1]


@both
def test_without_custom_metadata_there_is_an_empty_dict(writer, reader, tmp_path):
    writer.save(tmp_path / "x", STATE)
    with writer.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, STATE)
    of_ckpt = {"ckpt"} if writer is ours and reader is theirs else set()
    assert set(reader.metadata(tmp_path / "x").custom_metadata) == of_ckpt
    with reader.training.Checkpointer(tmp_path / "run") as checkpointer:
        assert set(checkpointer.metadata(0).custom_metadata) == of_ckpt
        assert checkpointer.root_metadata().custom_metadata == {}


@both
def test_metrics_of_any_json(writer, reader, tmp_path):
    metrics = {"eval": {"loss": 0.5, "by": "hand"}, "curve": [1, 2], "none": None}
    with writer.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, STATE, metrics=metrics)
    with reader.training.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.latest.metrics == metrics
        assert checkpointer.metadata(0).metrics == metrics


@pytest.mark.parametrize("writer", [ours, theirs], ids=["ours", "theirs"])
def test_numbers_and_text(writer, tmp_path):
    writer.save(tmp_path / "x", {"i": 3, "s": "3"})
    assert ours.load(tmp_path / "x", {"i": str, "s": ""}) == {"i": "3", "s": "3"}
    with pytest.raises(ValueError, match=r"s: saved str.* wanted a scalar, int"):
        ours.load(tmp_path / "x", {"i": 0, "s": int})


def test_whole_numbers_of_any_size(tmp_path):
    ours.save(tmp_path / "x", {"a": 2**70})
    assert ours.load(tmp_path / "x", {"a": 0}) == {"a": 2**70}
    assert ours.load(tmp_path / "x", {"a": float}) == {"a": float(2**70)}
