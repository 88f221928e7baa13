"""``register``: an adapter of the program's own; and two adapters for one class."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import _adapters


class Ring:
    def __init__(self, size: int) -> None:
        self.losses, self.lock = np.arange(float(size)), threading.Lock()


class RingAdapter:
    def accepts(self, cls: type, /) -> bool:
        return issubclass(cls, Ring)

    def get_state(self, obj: Ring, /) -> Any:
        return {"losses": obj.losses}

    def set_state(self, obj: Ring, state: Any, /) -> None:
        obj.losses = state["losses"]


class Another(RingAdapter):
    """Another adapter of the same class."""


@pytest.fixture(autouse=True)
def none_registered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_adapters, "_registered", {})
    _adapters._for_class.cache_clear()
    yield
    _adapters._for_class.cache_clear()


def test_a_registered_adapter_saves_and_restores(tmp_path):
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"ckpt\.register an adapter"):
        ckpt.save(tmp_path / "a", ring=Ring(3))
    ckpt.register(RingAdapter())
    ckpt.save(tmp_path / "a", ring=Ring(3))
    ckpt.save(tmp_path / "b", {"deep": [Ring(3)]})
    fresh = Ring(3)
    fresh.losses = np.zeros(3)
    assert ckpt.restore(tmp_path / "a", ring=fresh)["ring"] is fresh
    assert fresh.losses.tolist() == [0, 1, 2]
    fresh.losses = np.zeros(3)
    ckpt.restore(tmp_path / "b", {"deep": [fresh]})
    assert fresh.losses.tolist() == [0, 1, 2]
    with pytest.raises(ckpt.StructureMismatch, match=r"ring.*losses"):
        ckpt.restore(tmp_path / "a", ring=Ring(4))


def test_a_cell_that_runs_again_replaces_its_adapter(tmp_path):
    one, other = RingAdapter(), RingAdapter()
    ckpt.register(one)
    ckpt.register(other)
    assert _adapters.adapter_for(Ring(1)) is other


def test_two_registered_are_both_named(tmp_path):
    ckpt.register(RingAdapter())
    ckpt.register(Another())
    with pytest.raises(
        ckpt.CheckpointError,
        match=r"2 adapters are registered for .*Ring: .*Another, .*RingAdapter",
    ):
        ckpt.save(tmp_path / "a", ring=Ring(3))


def test_two_installed_are_both_named(tmp_path, monkeypatch):
    root = __name__.partition(".")[0]
    entries = [
        SimpleNamespace(value="one:ADAPTER", load=RingAdapter),
        SimpleNamespace(value="other:ADAPTER", load=Another),
    ]
    monkeypatch.setattr(_adapters, "_installed", lambda: {(root, e.value): e for e in entries})
    with pytest.raises(
        ckpt.CheckpointError,
        match=r"2 adapters are installed for .*: one:ADAPTER, other:ADAPTER.*Uninstall",
    ):
        ckpt.save(tmp_path / "a", ring=Ring(3))
    mine = RingAdapter()
    ckpt.register(mine)
    assert _adapters.adapter_for(Ring(1)) is mine


def test_one_installation_found_twice_is_one(monkeypatch):
    entry = SimpleNamespace(name="rings", value="rings:ADAPTER")
    monkeypatch.setattr(_adapters, "entry_points", lambda group: [entry, entry])
    found = _adapters._installed.__wrapped__()
    assert found == {("rings", "rings:ADAPTER"): entry}


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        (RingAdapter, r"not a class: write ckpt\.register\(RingAdapter\(\)\)"),
        (object(), "no accepts and no get_state and no set_state"),
        (SimpleNamespace(accepts=bool, get_state=bool), "has no set_state"),
    ],
)
def test_what_is_no_adapter(adapter, told):
    with pytest.raises(TypeError, match=told):
        ckpt.register(adapter)
    assert not _adapters._registered
