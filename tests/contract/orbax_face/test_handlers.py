"""Checkpointables that write files of their own, JSON, and data pipelines."""

from __future__ import annotations

import asyncio
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


class LoudHandler(VocabularyHandler):
    """The same files, other objects."""

    async def load(self, directory, abstract_checkpointable=None):
        found = await (await super().load(directory))

        async def shout():
            return [word.upper() for word in found.words]

        return shout()

    def is_handleable(self, checkpointable):
        return False

    def is_abstract_handleable(self, abstract_checkpointable):
        return abstract_checkpointable == "loud"


class Position:
    """Saves and loads itself."""

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
    registry.add(VocabularyHandler).add(LoudHandler)
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
    assert ocp.load_checkpointables(path, {"words": "loud"})["words"] == ["CAT", "DOG"]
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


def test_a_handler_for_one_name(tmp_path):
    class Any(VocabularyHandler):
        def is_handleable(self, checkpointable):
            return isinstance(checkpointable, dict)

        async def save(self, directory, checkpointable):
            return await super().save(directory, Vocabulary(list(checkpointable)))

    registry = ocp.handlers.local_registry()
    registry.add(Any, checkpointable_name="one")
    context = ocp.Context()
    context.checkpointables.registry = registry
    with context:
        ocp.save_checkpointables(tmp_path / "x", {"one": {"a": 1}, "two": {"a": 1}})
        loaded = ocp.load_checkpointables(tmp_path / "x")
    assert loaded == {"one": Vocabulary(["a"]), "two": {"a": 1}}


def test_objects_that_save_themselves(tmp_path):
    ocp.save_checkpointables(tmp_path / "x", {"at": Position(7), "n": 3})
    assert (tmp_path / "x" / "at" / "at.txt").read_text() == "7"
    mine = Position(0)
    loaded = ocp.load_checkpointables(tmp_path / "x", {"at": mine, "n": None})
    assert loaded["at"] is mine
    assert mine.at == 7
    with pytest.raises(ValueError, match="To restore a `StatefulCheckpointable`, you must pass"):
        ocp.load_checkpointables(tmp_path / "x")


def test_inside_of_an_event_loop(tmp_path):
    async def main():
        ocp.save_checkpointables(tmp_path / "x", {"at": Position(7)})
        return ocp.load_checkpointables(tmp_path / "x", {"at": Position(0)})["at"].at

    assert asyncio.run(main()) == 7


def test_an_error_of_a_handler_leaves_nothing(tmp_path):
    class Failing(Position):
        async def save(self, directory):
            await directory.await_creation()
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        ocp.save_checkpointables_async(tmp_path / "x", {"at": Failing(1), "n": 3}).result()
    assert list(tmp_path.iterdir()) == []


def test_json_for_one_name(tmp_path):
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="config")
    context = ocp.Context()
    context.checkpointables.registry = registry
    value = {"layers": [1, None, {"x": "y"}], "on": True}
    with context:
        ocp.save_checkpointables(tmp_path / "x", {"config": value, "state": {"w": 1.0}})
    loaded = ocp.load_checkpointables(tmp_path / "x")  # what was saved decides
    assert loaded == {"config": value, "state": {"w": 1.0}}
    assert json.loads((tmp_path / "x" / "config" / "data.json").read_text()) == value
    assert ocp.checkpointables_metadata(tmp_path / "x").metadata["config"] is None


def test_items_of_ckpts_own(tmp_path):
    (tmp_path / "file").write_text("text")
    items = {"files": ckpt.Files(tmp_path / "file"), "json": ckpt.Json([1]), "n": 1}
    ocp.save_checkpointables(tmp_path / "x", items)
    loaded = ocp.load_checkpointables(tmp_path / "x")
    assert loaded.pop("files").read("file") == b"text"
    assert loaded == {"json": [1], "n": 1}
    assert ocp.checkpointables_metadata(tmp_path / "x").metadata == {
        "files": None,
        "json": None,
        "n": 0,
    }


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


def test_registries():
    registry = ocp.handlers.local_registry(include_global_registry=False)
    assert registry.get_all_entries() == []
    registry.add(VocabularyHandler, checkpointable_name="words")
    assert registry.has("words")
    assert registry.get("words") is VocabularyHandler
    with pytest.raises(ocp.handlers.AlreadyExistsError, match="'words' has a handler"):
        registry.add(LoudHandler, checkpointable_name="words")
    registry.add(LoudHandler)
    for handler in (LoudHandler, VocabularyHandler):
        with pytest.raises(ValueError, match="is in this registry"):
            registry.add(handler)
    with pytest.raises(KeyError, match="no handler is registered"):
        registry.get("other")
    with pytest.raises(ValueError, match="as a class"):
        registry.add(VocabularyHandler())
    both = ocp.handlers.local_registry(registry)
    assert both.has("words")
    assert len(both.get_all_entries()) > len(registry.get_all_entries())
    with pytest.raises(NotImplementedError, match="local_registry"):
        ocp.Context().checkpointables.registry.add(VocabularyHandler)
