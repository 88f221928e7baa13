"""What the user's own code raises is no damage: it arrives as it is, and no step is passed over because of it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt

ERRORS = (ValueError, KeyError, EOFError, MemoryError, OSError, FileNotFoundError)
pytestmark = pytest.mark.filterwarnings("error")


class Box:
    def __init__(self, value: int = -1, bad: str = "", error: Exception | None = None) -> None:
        self.value, self.bad, self.error = value, bad, error

    def asked(self, call: str, *_: Any) -> bool:
        if self.bad == call and self.error is not None:
            raise self.error
        return True


class Adapter:
    def accepts(self, cls: type, /) -> bool:
        return issubclass(cls, Box)

    def get_state(self, obj: Box, /) -> Any:
        return {"value": obj.value} if obj.asked("get_state") else None

    def set_state(self, obj: Box, state: Any, /) -> None:
        obj.value = state["value"] if obj.asked("set_state") else 0


def latest(directory: Path, box: Box, **more: Any) -> None:
    with ckpt.Checkpointer(directory) as run:
        found = run.restore_latest(w=np.zeros(50_000), box=box, **more)
        assert found is not None and found.step == found["w"][0] == box.value == 1


@pytest.fixture(autouse=True)
def _saved(tmp_path: Path) -> Iterator[None]:
    """Two steps, which are there and sound at the end, too."""
    ckpt.register(Adapter())
    with ckpt.Checkpointer(tmp_path) as run:
        for step in range(2):
            run.save(step, w=np.full(50_000, float(step)), box=Box(step))
    yield
    latest(tmp_path, Box())
    assert sorted(name for name in os.listdir(tmp_path) if name[0] != ".") == ["0", "1"]


@pytest.mark.parametrize("bad", ["only", "get_state", "set_state"])
@pytest.mark.parametrize("error", ERRORS)
def test_code_of_the_user_raises(tmp_path, error, bad):
    box = Box(-1, bad, error(5, "of the user's code"))
    how: dict[str, Any] = {"only": lambda *_: box.asked("only")} if bad == "only" else {}
    calls = [
        lambda: latest(tmp_path, box, **how),
        lambda: ckpt.restore(tmp_path / "1", box=box, unexpected="ignore", **how),
    ]
    if bad == "get_state":
        calls.append(lambda: ckpt.save(tmp_path / ".other", box=box))
    for call in calls:
        with pytest.raises(error) as caught:
            call()
        assert caught.value is box.error
