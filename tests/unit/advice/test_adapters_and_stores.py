"""Adapters of one's own, buckets, secrets, large files, and ``ckpt_core.testing``: what messages say to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import _adapters
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
    with told("register takes an object, not a class: write ckpt.reg") as said:
        ckpt.register(RingAdapter)  # pyright: ignore[reportArgumentType]
    eval(said.text.rpartition("write ")[2], {"ckpt": ckpt, "RingAdapter": RingAdapter})
    assert rings_come_back(tmp_path / "a")


def test_no_adapter(tmp_path: Path):
    with told(": see ckpt.Adapter for what they do") as said:
        ckpt.register(SimpleNamespace(accepts=lambda cls: cls is Ring))  # pyright: ignore
    lacking = said.between("it has no ", ":").split(" and no ")
    assert all(getattr(ckpt.Adapter, name).__doc__ for name in lacking)
    ckpt.register(RingAdapter())
    assert rings_come_back(tmp_path / "a")


@pytest.mark.parametrize("action", ["one", "tell apart"])
def test_two_registered(tmp_path: Path, action: str):
    ckpt.register(RingAdapter())
    ckpt.register(Another())
    with told("Register one of them, or let their accepts() distinguish"):
        rings_come_back(tmp_path / "a")
    _adapters._registered.clear()  # the program is started again
    ckpt.register(RingAdapter())
    if action == "tell apart":
        ckpt.register(OfAnother())
    assert rings_come_back(tmp_path / "a")


# Buckets


# The secret of local steps


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
    with told("Call report(step, loss=loss) once a step", of=AssertionError):
        assert_exact_resume(lambda directory, report: training(directory, report, steps=2))
    with told("was reported before: call report once a step"):
        assert_exact_resume(lambda directory, report: training(directory, report, twice=True))
    with told(
        "or it was not restored, so no resume was tested. Int",
        of=AssertionError,
    ):
        assert_exact_resume(
            lambda directory, report: training(directory, report, saves=False), interrupt_at=2
        )
    assert assert_exact_resume(training, interrupt_at=2)
