"""What a signal handler or the user's own code raises is no damage: it arrives as it is, and no step is passed over because of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
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


@pytest.mark.parametrize("call", ["restore_latest", "load"])
def test_a_handler_raises_while_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The signal comes at every call that reads, by whatever thread, one after the other."""
    left, raised = 0, list[Exception]()

    def handler(*_: Any) -> None:
        raised.append(ValueError("of the handler"))
        raise raised[-1]

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            return real(*arguments, **named)

        return counted

    before = signal.signal(signal.SIGUSR1, handler)
    for name in ("open", "read", "pread", "preadv", "listdir", "scandir"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    number = 0
    while left <= 0:
        left, met, number = number + 1, None, number + 1
        try:
            ckpt.load(tmp_path / "1") if call == "load" else latest(tmp_path, Box())
        except ValueError as error:
            met = error
        assert met is (raised[-1] if left <= 0 else None), number
    monkeypatch.undo()
    signal.signal(signal.SIGUSR1, before)
    assert len(raised) == number - 1 > 3


@pytest.mark.parametrize("bad", ["only", "get_state", "set_state"])
@pytest.mark.parametrize("error", ERRORS)
def test_code_of_the_user_raises(tmp_path: Path, error: type[Exception], bad: str) -> None:
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
