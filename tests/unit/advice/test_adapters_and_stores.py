"""Adapters of one's own, buckets, secrets, large files, and ``ckpt_core.testing``: what messages say to do."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import _adapters
from ckpt_core._directory.private_file import read_secret
from ckpt_core.testing import assert_exact_resume
from tests.contract.advice.said import told

W = np.arange(4.0)
STATE = {"w": W}
FAST = ckpt.Options(durable=False)


def save(path: Any, *state: Any, **named: Any) -> None:
    ckpt.save(path, *state, options=FAST, **named)


def right(path: Any) -> bool:
    return np.array_equal(ckpt.load(path)["w"], W)


# Adapters


class Ring:
    def __init__(self) -> None:
        self.w = np.zeros(4)


class RingAdapter:
    def accepts(self, cls: type, /) -> bool:
        return issubclass(cls, Ring)

    def get_state(self, obj: Ring, /) -> Any:
        return {"w": obj.w}

    def set_state(self, obj: Ring, state: Any, /) -> None:
        obj.w = state["w"]


class Another(RingAdapter):
    """For the same class."""


class OfAnother(RingAdapter):
    """For another class only."""

    def accepts(self, cls: type, /) -> bool:
        return cls is int


@pytest.fixture(name="registered", autouse=True)
def none_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_adapters, "_registered", {})
    _adapters._for_class.cache_clear()
    yield
    _adapters._for_class.cache_clear()


def rings_come_back(path: Path) -> bool:
    ring, again = Ring(), Ring()
    ring.w = W
    save(path, ring=ring)
    ckpt.restore(path, ring=again)
    return np.array_equal(again.w, W)


def test_a_class_for_an_adapter(tmp_path: Path):
    with told(
        "_adapters/__init__.py: register takes an object, not a class: write ckpt.reg"
    ) as said:
        ckpt.register(RingAdapter)  # pyright: ignore[reportArgumentType]
    eval(said.text.rpartition("write ")[2], {"ckpt": ckpt, "RingAdapter": RingAdapter})
    assert rings_come_back(tmp_path / "a")


def test_no_adapter(tmp_path: Path):
    with told("_adapters/__init__.py: : see ckpt.Adapter for what they do") as said:
        ckpt.register(SimpleNamespace(accepts=lambda cls: cls is Ring))  # pyright: ignore
    lacking = said.between("it has no ", ":").split(" and no ")
    assert all(getattr(ckpt.Adapter, name).__doc__ for name in lacking)
    ckpt.register(RingAdapter())
    assert rings_come_back(tmp_path / "a")


@pytest.mark.parametrize("action", ["one", "tell apart"])
def test_two_registered(tmp_path: Path, action: str):
    ckpt.register(RingAdapter())
    ckpt.register(Another())
    with told("_adapters/__init__.py: Register one of them, or let their accepts() distinguish"):
        rings_come_back(tmp_path / "a")
    _adapters._registered.clear()  # the program is started again
    ckpt.register(RingAdapter())
    if action == "tell apart":
        ckpt.register(OfAnother())
    assert rings_come_back(tmp_path / "a")


@pytest.mark.parametrize("action", ["uninstall", "register"])
def test_two_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str):
    root = __name__.partition(".")[0]
    entries = [
        SimpleNamespace(value="one:ADAPTER", load=RingAdapter),
        SimpleNamespace(value="other:ADAPTER", load=Another),
    ]
    monkeypatch.setattr(_adapters, "_installed", lambda: {root: entries})
    with told(
        "_adapters/__init__.py: Uninstall the package of all but one, or ckpt.register the"
    ) as said:
        rings_come_back(tmp_path / "a")
    assert "one:ADAPTER" in said.text and "other:ADAPTER" in said.text
    if action == "uninstall":
        entries.pop()
        _adapters._for_class.cache_clear()
    else:
        ckpt.register(RingAdapter())
    assert rings_come_back(tmp_path / "a")


# Buckets


def test_urls(tmp_path: Path):
    with told("_directory/paths.py: names no bucket: write") as said:
        save("gs:///run/a", STATE)
    assert said.text.rpartition("write ")[2] == "gs://BUCKET/run/a"
    bucket = f"memory://advice-{os.getpid()}"
    with told("_directory/object_store.py: choose another path, of parts between single"):
        save(f"{bucket}/a/../b", STATE)
    save(f"{bucket}/a/b", STATE)
    assert right(f"{bucket}/a/b")


@pytest.mark.parametrize("action", ["another path", "overwrite"])
def test_something_is_there_in_a_bucket(action: str):
    url = f"memory://advice-{os.getpid()}/{action.replace(' ', '-')}"
    save(f"{url}/a", {"w": W + 1})
    with told("_directory/object_store.py: choose another path, or pass overwrite=True to") as said:
        save(f"{url}/a", STATE)
    if action == "another path":
        save(f"{url}/b", STATE)
        assert right(f"{url}/b") and not right(f"{url}/a")
    else:
        save(f"{url}/a", STATE, **eval(f"dict({said.between('or pass ', ' to replace')})"))
        assert right(f"{url}/a")
    with told(
        "_directory/object_store.py: which would no longer be what was saved: choose another"
    ):
        save(f"{url}/a/inside", STATE)
    save(f"{url}/c", STATE)
    assert right(f"{url}/c")


@pytest.mark.parametrize("action", ["another path", "move it away"])
@pytest.mark.parametrize("name", ["notes", "ckpt.json"])
def test_something_else_is_there_in_a_bucket(name: str, action: str):
    from ckpt_core._storage import backend_of

    url = f"memory://advice-{os.getpid()}-{name}-{action.replace(' ', '-')}"
    backend: Any = backend_of(False)
    keys = backend._open(f"{url}/a")
    keys.put(name, b"mine")
    key = "_directory/object_store.py: ): choose another path"
    if name != "notes":
        key = "_directory/object_store.py: choose another path, or move it away; overwrite=True replaces"
    with told(key):
        save(f"{url}/a", STATE, overwrite=True)
    if action == "another path":
        save(f"{url}/b", STATE)
        assert right(f"{url}/b") and keys.get(name) == b"mine"
    elif name != "notes":
        backend._open(f"{url}/mine").put(name, keys.get(name))
        keys.delete([name])
        save(f"{url}/a", STATE)
        assert right(f"{url}/a")


def test_files_that_do_not_fit_into_memory(tmp_path: Path):
    (tmp_path / "a.txt").write_text("mine" * 1000)
    (tmp_path / "small.txt").write_text("mine")
    url = f"memory://advice-{os.getpid()}-files"
    few = ckpt.Options(max_host_bytes=1024)
    with told("_save/plain_items.py: , or keep the largest of them elsewhere") as said:
        ckpt.save(f"{url}/a", files=ckpt.Files(tmp_path / "a.txt"), options=few)
    options = eval(f"ckpt.{said.between('pass options=ckpt.', ', or keep')}", {"ckpt": ckpt})
    ckpt.save(f"{url}/a", files=ckpt.Files(tmp_path / "a.txt"), options=options)
    assert ckpt.load(f"{url}/a", item="files").read("a.txt") == b"mine" * 1000
    ckpt.save(f"{url}/b", files=ckpt.Files(tmp_path / "small.txt"), options=few)
    assert ckpt.load(f"{url}/b", item="files").read("small.txt") == b"mine"


def test_files_into_a_bucket(tmp_path: Path):
    (tmp_path / "a.txt").write_text("mine")
    save(tmp_path / "a", files=ckpt.Files(tmp_path / "a.txt"))
    files = ckpt.load(tmp_path / "a", item="files")
    with told(
        "_items.py: where a path on a disk is wanted: copy between the two, or mount the bucket"
    ):
        files.copy_to("gs://bucket/files")
    assert (files.copy_to(tmp_path / "copy") / "a.txt").read_text() == "mine"


# The secret of local steps


def test_a_secret_that_is_none(tmp_path: Path):
    with told("_directory/private_file.py: is no regular file: name one that holds a secret"):
        read_secret(str(tmp_path))
    file = tmp_path / "secret"
    file.write_bytes(b"short")
    file.chmod(0o644)
    with told("_directory/private_file.py: : it must belong to user") as said:
        read_secret(str(file))
    subprocess.run(shlex.split(said.between("(", ")")), check=True)
    with told("_directory/private_file.py: at least: head -c") as said:
        read_secret(str(file))
    subprocess.run(said.text.rpartition("at least: ")[2], shell=True, check=True)
    assert len(read_secret(str(file))) >= 16


# Exact resume


def training(
    directory: str, report: Any, *, steps: int = 4, saves: bool = True, twice: bool = False
) -> Any:
    with ckpt.Checkpointer(directory, save_policy=lambda *_: saves, options=FAST) as run:
        w, begin = np.zeros(2), 0
        restored = run.restore_latest({"w": w})
        if restored is not None:
            w, begin = restored["state"]["w"], int(restored.step or 0) + 1
        for step in range(begin, steps):
            w = w + step
            run.save(step, {"w": w})
            report(step, loss=w.sum())
            if twice:
                report(step, loss=w.sum())
    return {"w": w}


def test_exact_resume_of_too_little():
    with told("testing/_resume.py: Call report(step, loss=loss) once a step", of=AssertionError):
        assert_exact_resume(lambda directory, report: training(directory, report, steps=2))
    with told("testing/_runs.py: was reported before: call report once a step"):
        assert_exact_resume(lambda directory, report: training(directory, report, twice=True))
    with told(
        "testing/_resume.py: or it was not restored, so no resume was tested. Int",
        of=AssertionError,
    ):
        assert_exact_resume(
            lambda directory, report: training(directory, report, saves=False), interrupt_at=2
        )
    assert assert_exact_resume(training, interrupt_at=2)
