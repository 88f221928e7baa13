"""Grain's own arguments and handler after the one-import change, beside Orbax; and handlers that take a pipeline."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint
import pytest

import ckpt_orbax

pytest.importorskip("grain")
import grain.python as pygrain
from grain import MapDataset, checkpoint

BOTH = [orbax.checkpoint, ckpt_orbax]
STATE = {"w": np.ones(2, np.float32)}
SAVE, RESTORE, HANDLER = (
    checkpoint.CheckpointSave,
    checkpoint.CheckpointRestore,
    checkpoint.CheckpointHandler,
)


def dataset() -> Any:
    return iter(MapDataset.range(40).seed(1).shuffle().to_iter_dataset())


def loader() -> Any:
    sampler = pygrain.IndexSampler(40, pygrain.NoSharding(), shuffle=True, seed=1, num_epochs=1)
    return iter(pygrain.DataLoader(data_source=range(40), sampler=sampler, worker_count=0))


def managed(**how: Any) -> Callable[[Any, Path, Any, Any], Any]:
    """Saves and restores the item ``data`` of a manager."""

    def work(ocp: Any, path: Path, saved: Any, restored: Any) -> Any:
        given = {name: make(ocp) for name, make in how.items()}
        with ocp.CheckpointManager(path, **given) as manager:
            if saved is not None:
                args = ocp.args.Composite(state=ocp.args.StandardSave(STATE), data=SAVE(saved))
                if "item_handlers" in given or "handler_registry" in given or "item_names" in given:
                    args = ocp.args.Composite(data=SAVE(saved))
                manager.save(0, args=args)
                manager.wait_until_finished()
            return manager.restore(0, args=ocp.args.Composite(data=RESTORE(restored)))["data"]

    return work


def alone(ocp: Any, path: Path, saved: Any, restored: Any) -> Any:
    with ocp.CheckpointManager(path) as manager:
        if saved is not None:
            manager.save(0, args=SAVE(saved))
            manager.wait_until_finished()
        return manager.restore(0, args=RESTORE(restored))


def earlier(ocp: Any, path: Path, saved: Any, restored: Any) -> Any:
    with ocp.CheckpointManager(path, {"data": ocp.Checkpointer(HANDLER())}) as manager:
        if saved is not None:
            manager.save(0, {"data": saved})
        return manager.restore(0, {"data": restored})["data"]


def single(how: str) -> Callable[[Any, Path, Any, Any], Any]:
    """Saves and restores with a Checkpointer: by position, as ``item=`` or as ``args=``."""

    def given(value: Any, args: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return {
            "position": ((value,), {}),
            "item": ((), {"item": value}),
            "args": ((), {"args": args(value)}),
        }[how]

    def work(ocp: Any, path: Path, saved: Any, restored: Any) -> Any:
        checkpointer = ocp.Checkpointer(HANDLER())
        if saved is not None:
            positional, named = given(saved, SAVE)
            checkpointer.save(path / "one", *positional, **named)
        positional, named = given(restored, RESTORE)
        return checkpointer.restore(path / "one", *positional, **named)

    return work


def registry(ocp: Any) -> Any:
    found = ocp.handlers.DefaultCheckpointHandlerRegistry()
    found.add("data", SAVE, HANDLER())
    found.add("data", RESTORE, HANDLER())
    return found


FORMS = {
    "arguments alone": managed(),
    "without a name": alone,
    "item_handlers": managed(item_handlers=lambda ocp: {"data": HANDLER()}),
    "item_names": managed(item_names=lambda ocp: ("data",)),
    "handler_registry": managed(handler_registry=registry),
    "checkpointers": earlier,
    "position": single("position"),
    "item": single("item"),
    "args": single("args"),
}


@pytest.mark.parametrize("make", [dataset, loader])
@pytest.mark.parametrize("ocp", BOTH)
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_arguments(tmp_path, form, ocp, make):
    saved, restored = make(), make()
    for _ in range(3):
        next(saved)
    assert FORMS[form](ocp, tmp_path, saved, restored) is restored
    assert [next(restored) for _ in range(4)] == [next(saved) for _ in range(4)]


@pytest.mark.parametrize("form", ["arguments alone", "item_handlers", "checkpointers"])
@pytest.mark.parametrize(("writer", "reader"), [BOTH, BOTH[::-1]])
def test_from_one_library_to_the_other(tmp_path, form, writer, reader):
    saved, restored = dataset(), dataset()
    for _ in range(3):
        next(saved)
    FORMS[form](writer, tmp_path, saved, dataset())
    assert FORMS[form](reader, tmp_path, None, restored) is restored
    assert next(restored) == next(saved)


def test_the_names_of_pygrain_are_the_same_classes():
    assert pygrain.PyGrainCheckpointSave is SAVE
    assert pygrain.PyGrainCheckpointRestore is RESTORE
    assert pygrain.PyGrainCheckpointHandler is HANDLER


def own_handler(ocp: Any, calls: list[str]) -> tuple[Any, Any]:
    class Own(ocp.CheckpointHandler):
        """Writes a position by itself, as MaxText's and kauldron's handlers do."""

        def _file(self, directory: Any) -> Any:
            return directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"

        def save(self, directory: Any, item: Any = None, args: Any = None) -> None:
            calls.append("save")
            self._file(directory).write_text(json.dumps(args.item.get_state()))

        def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:
            calls.append("restore")
            args.item.set_state(json.loads(self._file(directory).read_text()))
            return args.item

    @ocp.args.register_with_handler(Own, for_save=True)
    @dataclasses.dataclass
    class OwnSave(ocp.args.CheckpointArgs):
        item: Any

    @ocp.args.register_with_handler(Own, for_restore=True)
    @dataclasses.dataclass
    class OwnRestore(ocp.args.CheckpointArgs):
        item: Any

    return OwnSave, OwnRestore


@pytest.mark.parametrize("reader", BOTH)
@pytest.mark.parametrize("writer", BOTH)
def test_a_handler_whose_item_is_a_pipeline_is_called(tmp_path, writer, reader):
    saved, restored, calls = dataset(), dataset(), list[str]()
    for _ in range(3):
        next(saved)
    save, _ = own_handler(writer, calls)
    with writer.CheckpointManager(tmp_path) as manager:
        args = writer.args.Composite(state=writer.args.StandardSave(STATE), data=save(saved))
        manager.save(0, args=args)
    _, restore = own_handler(reader, calls)
    with reader.CheckpointManager(tmp_path) as manager:
        manager.restore(0, args=reader.args.Composite(data=restore(restored)))
    assert calls == ["save", "restore"]
    assert next(restored) == next(saved)


@pytest.mark.parametrize("ocp", BOTH)
def test_arguments_of_grain_are_registered_with_another_handler(ocp, tmp_path):
    class Quiet(ocp.CheckpointHandler):
        def save(self, directory: Any, args: Any = None) -> None:
            (directory / "position").write_text(json.dumps(args.item.get_state()))

        def restore(self, directory: Any, args: Any = None) -> Any:
            return json.loads((directory / "position").read_text())

    class Save(SAVE):
        pass

    class Restore(RESTORE):
        pass

    ocp.args.register_with_handler(Quiet, for_save=True)(Save)
    ocp.args.register_with_handler(Quiet, for_restore=True)(Restore)
    iterator = dataset()
    next(iterator)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(data=Save(iterator)))
        manager.wait_until_finished()
        found = manager.restore(0, args=ocp.args.Composite(data=Restore(None)))
    assert found["data"] == iterator.get_state()
