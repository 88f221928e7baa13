"""Calls functions in a new process."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt_core.testing._prints import Prints, prints_from

TIMEOUT_SECS = 300


def call(function: Callable[..., dict[str, Prints]], *arguments: Any) -> dict[str, Prints]:
    """The result of the function in a new interpreter; an error there is an AssertionError here, with the traceback in its message."""
    with tempfile.TemporaryDirectory(prefix="ckpt-testing-") as directory:
        answer = Path(directory) / "answer.json"
        sent = (str(answer), function, *map(portable, arguments))
        status = run_apart(_answer, sent, function.__name__, TIMEOUT_SECS)
        if not answer.exists():
            raise AssertionError(f"the new process ended with status {status}")
        found = json.loads(answer.read_text())
    if "error" in found:
        raise AssertionError(f"in a new process:\n{found['error']}")
    return {name: prints_from(prints) for name, prints in found.items()}


def run_apart(
    target: Callable[..., None], arguments: tuple[Any, ...], name: str, timeout_secs: float
) -> int | None:
    """The exit status of a new interpreter that calls ``target``; it is killed, with its process group, if that takes too long."""
    # spawn, because JAX and TensorStore do not survive a fork
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(timeout_secs)
    if not process.is_alive():
        return process.exitcode
    assert process.pid is not None
    for kill in (os.killpg, os.kill):
        try:
            kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has not made its process group yet, or has ended
    process.join()
    raise TimeoutError(f"{name} was not done after {timeout_secs:g} s in a process of its own")


def portable(value: Any) -> Any:
    """The value, or a substitute for it, that can be sent to a new process; TypeError if there is none."""
    try:
        pickle.dumps(value)
        return value
    except Exception as error:
        named = _ByName(getattr(value, "__module__", ""), getattr(value, "__qualname__", ""))
        if named.find() is value:  # a decorated function, such as a jitted one
            return named
        raise TypeError(
            f"{value!r} cannot be taken to a new process: it must be a function at the top of a "
            f"module (or a functools.partial of one), not a lambda or a local function. {error}"
        ) from error


class _ByName:
    """A wrapped function that pickle cannot send; the new process imports it by name."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def find(self) -> Any:
        return getattr(sys.modules.get(self._module), self._name, None)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(self._module), self._name)(*arguments, **options)


@contextmanager
def blocked(packages: Sequence[str]) -> Generator[None]:
    """Makes imports of these packages fail inside the block."""
    imported = [name for name in packages if sys.modules.get(name) is not None]
    if imported:
        raise AssertionError(f"{', '.join(imported)} was imported before it could be blocked")
    sys.modules.update(dict.fromkeys(packages))  # pyright: ignore  # None makes `import` fail
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]


def _answer(answer: str, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        found: dict[str, Any] = function(*arguments)
    except BaseException:
        found = {"error": traceback.format_exc()}
    Path(answer).write_text(json.dumps(found))
