"""A handler's exception at any moment of a replacement, or of the end of copying: it is told, and the next call works."""

from __future__ import annotations

import contextlib
import shutil
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._directory.syscalls import remove, remove_tree
from ckpt_core._run.tiers.copying import Copier
from tests.unit.interrupts.test_calls import AtMoment, Stop

# An exception in a generator that is being closed goes to sys.unraisablehook: that is Python's own doing.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def values(path: Path) -> int:
    return int(ckpt.load(path)["n"])


@pytest.mark.parametrize("exchange", [True, False])
def test_every_moment_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr("ckpt_core._directory.writing.exchange", lambda *_: False)
    options = ckpt.Options(durable=False)
    old, new = tmp_path / "old", tmp_path / "new"
    for value, path in enumerate((old, new)):
        ckpt.save(path, {"n": value}, options=options)
    found: list[int] = []
    for moment in range(1, 400):
        run = tmp_path / str(moment)
        shutil.copytree(old, run / "x")
        attempt = PosixBackend().begin(
            str(run / "x"), overwrite=True, durable=False, token="of the attempt"
        )
        shutil.copytree(new, attempt.path, dirs_exist_ok=True)
        interrupt = AtMoment(moment)
        told = None
        try:
            with interrupt:
                attempt.commit()
        except Stop as error:
            told = error
            attempt.abort()
        where = f"moment {moment}, at {interrupt.raised_in}"
        assert (told is not None) == bool(interrupt.raised_in) or "<" in interrupt.raised_in, where
        found.append(values(run / "x"))
        assert found[-1] == 1 or told is not None, where
        # a replaced one may be kept, but nothing that no other process may delete while this one lives
        assert not list(run.glob(".ckpt-tmp*")), where
        shutil.rmtree(run)
        if not interrupt.raised_in:
            break
    assert {*found} == {0, 1} and len(found) > 60


def test_a_copier_is_cancelled_again_after_every_moment() -> None:
    """``threading.Event`` kept its lock when a handler raised within ``set``, and the next save waited for it for ever."""
    peers: Any = SimpleNamespace(sources=(), copies=False)
    for moment in range(1, 100):
        copier = Copier(peers, lambda *_: pytest.fail("no target is asked for"), None)
        interrupt = AtMoment(moment)
        with contextlib.suppress(Stop), interrupt:
            copier.copy(1, "token")
            copier.cancel()
        again = threading.Thread(target=copier.cancel, daemon=True)
        again.start()
        again.join(30)
        assert not again.is_alive(), f"moment {moment}, at {interrupt.raised_in}"
        if not interrupt.raised_in:
            break
    assert 10 < moment < 99


@pytest.mark.parametrize("delete", [remove, remove_tree])
def test_what_is_handled_already_is_not_raised_again(
    tmp_path: Path, delete: Callable[[str], None]
) -> None:
    """Deleting what is gone fails while an exception is handled: that is not the exception of this call."""
    seen: list[int] = []
    try:
        raise Stop
    except Stop as stop:
        seen.append(len(traceback.extract_tb(stop.__traceback__)))
        with contextlib.suppress(FileNotFoundError):
            delete(str(tmp_path / "gone"))
        seen.append(len(traceback.extract_tb(stop.__traceback__)))
    assert seen == [1, 1]
