"""Checkpointables that write files of their own, JSON, and data pipelines."""

import dataclasses
import json

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_orbax import v1 as ocp
from tests.support.trees import assert_same


@dataclasses.dataclass
class Vocabulary:
    words: list[str]


class AbstractVocabulary:
    pass


class VocabularyHandler(ocp.CheckpointableHandler[Vocabulary, AbstractVocabulary]):
    """Writes in the background, as most handlers do."""

    async def save(self, directory, checkpointable):
        words = list(checkpointable.words)

        async def write():
            path = await directory.await_creation()
            assert path.name == directory.name
            (path / "inner").mkdir()
            (path / "inner" / "words.json").write_text(json.dumps(words))

        return write()

    async def load(self, directory, abstract_checkpointable=None):
        async def read():
            return Vocabulary(json.loads((directory / "inner" / "words.json").read_text()))

        return read()

    async def metadata(self, directory):
        assert (directory / "inner" / "words.json").exists()
        return AbstractVocabulary()

    def is_handleable(self, checkpointable):
        return isinstance(checkpointable, Vocabulary)

    def is_abstract_handleable(self, abstract_checkpointable):
        return isinstance(abstract_checkpointable, AbstractVocabulary)


class Position:
    def __init__(self, at):
        self.at = at

    async def save(self, directory):
        at = self.at

        async def write():
            ((await directory.await_creation()) / "at.txt").write_text(str(at))

        return write()

    async def load(self, directory):
        async def read():
            self.at = int((directory / "at.txt").read_text())

        return read()


@pytest.fixture
def with_handlers():
    registry = ocp.handlers.local_registry()
    registry.add(VocabularyHandler)
    context = ocp.Context()
    context.checkpointables.registry = registry
    with context:
        yield registry


WORDS = Vocabulary(["cat", "dog"])


def test_a_handler_saves_and_loads(tmp_path, with_handlers):
    path = tmp_path / "x"
    ocp.save_checkpointables(path, {"state": {"w": np.ones(2)}, "words": WORDS})
    assert (path / "words" / "inner" / "words.json").read_text() == '["cat", "dog"]'
    assert ckpt.verify(path).ok
    for target in (None, {"words": None}, {"words": AbstractVocabulary()}):
        assert ocp.load_checkpointables(path, target)["words"] == WORDS
    described = ocp.checkpointables_metadata(path)
    assert isinstance(described.metadata["words"], AbstractVocabulary)
    assert_same(ocp.load(path), {"w": np.ones(2)})
    assert ocp.load_checkpointables(path, described)["words"] == WORDS


def test_damage_is_found_before_the_handler_sees_it(tmp_path, with_handlers):
    path = tmp_path / "x"
    ocp.save_checkpointables(path, {"words": WORDS})
    file = path / "words" / "inner" / "words.json"
    file.write_text(file.read_text().replace("cat", "cow"))
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"words\.json"):
        ocp.load_checkpointables(path)


def test_without_the_handler_the_files_are_there(tmp_path, with_handlers):
    path = tmp_path / "x"
    ocp.save_checkpointables(path, {"words": WORDS})
    with ocp.Context():
        with pytest.raises(KeyError, match="register one with"):
            ocp.load_checkpointables(path)
        with pytest.raises(ocp.handlers.NoEntryError, match="into a AbstractVocabulary"):
            ocp.load_checkpointables(path, {"words": AbstractVocabulary()})
        assert ocp.checkpointables_metadata(path).metadata == {"words": None}
        with pytest.raises(ocp.handlers.NoEntryError, match='checkpointable: "words"'):
            ocp.save_checkpointables(tmp_path / "y", {"words": WORDS})
    assert json.loads(ckpt.load(path)["words"].read("inner/words.json")) == ["cat", "dog"]


def test_objects_that_save_themselves(tmp_path):
    ocp.save_checkpointables(tmp_path / "x", {"at": Position(7), "n": 3})
    assert (tmp_path / "x" / "at" / "at.txt").read_text() == "7"
    mine = Position(0)
    loaded = ocp.load_checkpointables(tmp_path / "x", {"at": mine, "n": None})
    assert loaded["at"] is mine
    assert mine.at == 7
    with pytest.raises(ValueError, match="To restore a `StatefulCheckpointable`, you must pass"):
        ocp.load_checkpointables(tmp_path / "x")


def test_an_error_of_a_handler_leaves_nothing(tmp_path):
    class Failing(Position):
        async def save(self, directory):
            await directory.await_creation()
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        ocp.save_checkpointables_async(tmp_path / "x", {"at": Failing(1), "n": 3}).result()
    assert list(tmp_path.iterdir()) == []


def test_a_data_pipeline(tmp_path):
    grain = pytest.importorskip("grain")

    def pipeline():
        return iter(grain.MapDataset.range(20).seed(1).shuffle().to_iter_dataset())

    iterator = pipeline()
    for _ in range(3):
        next(iterator)
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_checkpointables(0, {"state": {"w": np.ones(1)}, "data": iterator})
        expected = [next(iterator) for _ in range(5)]
        again = pipeline()
        loaded = checkpointer.load_checkpointables(0, {"data": again})
        assert loaded == {"data": again}
        assert [next(again) for _ in range(5)] == expected
        with pytest.raises(ValueError, match="To restore a `StatefulCheckpointable`"):
            checkpointer.load_checkpointables(0)
