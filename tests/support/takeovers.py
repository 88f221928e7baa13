"""A run that takes a directory of steps over from another."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.stores import WITH_STORES, url_of_kind

QUICK = ckpt.Options(durable=False)
LIMIT_SECS = 240
OLD, NEW = 100, 200


def state(value: int) -> dict[str, Any]:
    return {"value": np.full(2000, value)}


def value_of(tree: Any) -> int:
    assert (tree["value"] == tree["value"][0]).all()
    return int(tree["value"][0])


def start(directory: Any, **more: Any) -> ckpt.Checkpointer:
    more.setdefault("options", QUICK)
    return ckpt.Checkpointer(directory, **more)


def values(directory: Any) -> dict[int, int]:
    with start(directory, read_only=True) as reader:
        return {step: value_of(reader.load(step)) for step in reader.all_steps()}


def write(directory: Any, *steps: int) -> None:
    with start(directory) as checkpointer:
        for step in steps:
            assert checkpointer.save(step, state(step), force=True)


def resume(checkpointer: ckpt.Checkpointer) -> int | None:
    restored = checkpointer.restore_latest(state=state(-1))
    if restored is None:
        return None
    value_of(restored["state"])
    return restored.step


def save(checkpointer: ckpt.Checkpointer, step: int, base: int) -> None:
    assert checkpointer.save(step, state(base + step))
    checkpointer.wait_until_finished()


@pytest.fixture(name="directory", params=WITH_STORES)
def make_directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "run")
    return url_of_kind(request, request.param)


def retired(directory: str) -> dict[str, int]:
    place = Path(directory) / "retired"
    return {path.name: value_of(ckpt.load(path)) for path in sorted(place.glob("*"))}
