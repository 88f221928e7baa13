"""What only Linux has is taken away: saves, overwrites and loads still work."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import owner, syscalls


class _NoLibrary:
    """A C library without the calls of Linux."""

    def __init__(self, *_: object, **__: object) -> None: ...


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No renameat2, no statfs, no /proc."""
    real_open, real_readlink = builtins.open, os.readlink

    def refused(path: Any) -> bool:
        return isinstance(path, (str, Path)) and str(path).startswith("/proc")

    def no_open(path: Any, *args: Any, **kwargs: Any) -> Any:
        if refused(path):
            raise FileNotFoundError(path)
        return real_open(path, *args, **kwargs)

    def no_readlink(path: Any, *args: Any, **kwargs: Any) -> Any:
        if refused(path):
            raise FileNotFoundError(path)
        return real_readlink(path, *args, **kwargs)

    monkeypatch.setattr(syscalls.ctypes, "CDLL", _NoLibrary)
    monkeypatch.setattr(builtins, "open", no_open)
    monkeypatch.setattr(os, "readlink", no_readlink)
    owner._host.cache_clear()
    yield
    owner._host.cache_clear()


@pytest.mark.usefixtures("elsewhere")
def test_saves_overwrites_and_loads(tmp_path: Path) -> None:
    assert not syscalls.exchange(str(tmp_path), str(tmp_path))
    assert not syscalls.is_local_disk(str(tmp_path))
    for value in (1, 2):
        ckpt.save(tmp_path / "x", {"w": np.full(3, value)}, overwrite=True)
        assert ckpt.load(tmp_path / "x")["w"].tolist() == [value] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.usefixtures("elsewhere")
def test_a_run_goes_on(tmp_path: Path) -> None:
    for step in (1, 2):
        with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(step, state={"w": np.full(3, step)})
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.latest_step() == 2
