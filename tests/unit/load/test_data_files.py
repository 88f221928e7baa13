"""Data files: what is no file is named, and none stays open that nobody uses, whatever interrupts who opened it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import CheckpointCorrupt
from ckpt_core._storage import DataFiles, Location, arrays


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    return tmp_path


def still_open(folder: Path) -> list[str]:
    """The files in a folder that this process has open."""
    at = "/proc/self/fd"
    links = [f"{at}/{one}" for one in os.listdir(at)]
    found = [os.readlink(link) for link in links if os.path.lexists(link)]
    return sorted(name for name in found if name.startswith(str(folder)))


def use(files: DataFiles, of: str) -> Any:
    if of == "read":
        return files.read("a", 0, np.empty(10, np.uint8))
    if of == "check":
        return files.check(["a", "b"])
    return files.part("a")


USES = ["read", "part", "check"]  # a mapping of Python 3.12 holds a descriptor of its own


@pytest.mark.linux("/proc/self/fd")
@pytest.mark.parametrize("of", USES)
def test_files_that_are_too_many_to_stay_open_are_closed_after_each_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    monkeypatch.setattr(arrays, "_FEW_FILES", 1)
    monkeypatch.setattr(arrays, "_part_of_most_files", lambda: 1)
    files = DataFiles(Location(str(folder), True), {"a": 100, "b": 100})
    files.part("c")
    use(files, of)
    assert still_open(folder) == [str(folder / "c")]
    files.close()
    assert still_open(folder) == []


@pytest.mark.linux("/proc/self/fd")
@pytest.mark.parametrize("of", USES)
def test_an_error_between_opening_and_reading_leaves_nothing_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """A signal handler raises anywhere, here while the size is looked at."""
    files = DataFiles(Location(str(folder), True), {"a": 100, "b": 100})

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arrays.os, "fstat", interrupted)
        with pytest.raises(KeyboardInterrupt):
            use(files, of)
    files.close()
    assert still_open(folder) == []


@pytest.mark.linux("/proc/self/fd")
def test_files_that_nobody_closed_are_closed_with_the_last_reference(folder: Path) -> None:
    """As when a signal handler raises before the block begins that would close them."""
    files = DataFiles(Location(str(folder), True))
    files.part("a")
    assert still_open(folder) == [str(folder / "a")]
    del files
    assert still_open(folder) == []


@pytest.mark.linux("/proc/self/fd")
def test_a_socket_is_no_regular_file(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "one", {"w": np.arange(3000.0)})
    (data,) = (tmp_path / "one" / "state" / "d").iterdir()
    data.unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.open(data.parent, os.O_RDONLY)  # the path of a socket has at most 107 bytes
        try:
            listening.bind(f"/proc/self/fd/{here}/{data.name}")
        finally:
            os.close(here)
        with pytest.raises(CheckpointCorrupt, match=f"{data.name} is no regular file"):
            ckpt.load(tmp_path / "one")
