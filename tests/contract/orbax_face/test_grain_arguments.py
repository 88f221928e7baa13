"""Grain's own arguments and handler after the one-import change, beside Orbax; and handlers that take a pipeline."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain.python as pygrain
import numpy as np
import orbax.checkpoint
import pytest
from grain import MapDataset, checkpoint

import ckpt_orbax

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
                if given:
                    args = ocp.args.Composite(data=SAVE(saved))
                manager.save(0, args=args)
                manager.wait_until_finished()
            return manager.restore(0, args=ocp.args.Composite(data=RESTORE(restored)))["data"]

    return work


def earlier(ocp: Any, path: Path, saved: Any, restored: Any) -> Any:
    with ocp.CheckpointManager(path, {"data": ocp.Checkpointer(HANDLER())}) as manager:
        if saved is not None:
            manager.save(0, {"data": saved})
        return manager.restore(0, {"data": restored})["data"]


def single(how: str) -> Callable[[Any, Path, Any, Any], Any]:
    """Saves and restores with a Checkpointer: by position or as ``args=``."""

    def given(value: Any, args: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return {"position": ((value,), {}), "args": ((), {"args": args(value)})}[how]

    def work(ocp: Any, path: Path, saved: Any, restored: Any) -> Any:
        checkpointer = ocp.Checkpointer(HANDLER())
        if saved is not None:
            positional, named = given(saved, SAVE)
            checkpointer.save(path / "one", *positional, **named)
        positional, named = given(restored, RESTORE)
        return checkpointer.restore(path / "one", *positional, **named)

    return work


FORMS = {
    "arguments alone": managed(),
    "item_handlers": managed(item_handlers=lambda ocp: {"data": HANDLER()}),
    "checkpointers": earlier,
    "position": single("position"),
    "args": single("args"),
}


@pytest.mark.parametrize("ocp", BOTH)
@pytest.mark.parametrize(("form", "make"), list(zip(FORMS, itertools.cycle([dataset, loader]))))
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
