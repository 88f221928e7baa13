"""Settings and arguments are no items: a keyword that means one is answered with the way to say it."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._options import CHECKPOINTER_ARGUMENTS

STATE = {"w": np.ones(2)}
FIELDS = [field.name for field in dataclasses.fields(ckpt.Options)]
ARGUMENTS = [name for name in inspect.signature(ckpt.Checkpointer).parameters if name != "options"]


def test_all_arguments_of_a_checkpointer_are_known():
    assert set(ARGUMENTS) == CHECKPOINTER_ARGUMENTS


@pytest.fixture(name="calls")
def make_calls(tmp_path: Path):
    path = tmp_path / "a"
    ckpt.save(path, model=STATE)
    run = ckpt.Checkpointer(tmp_path / "run")
    with run:
        yield {
            "save": lambda **more: ckpt.save(tmp_path / "b", model=STATE, **more),
            "save of a state": lambda **more: ckpt.save(tmp_path / "b", STATE, **more),
            "save_async": lambda **more: ckpt.save_async(tmp_path / "b", model=STATE, **more),
            "restore": lambda **more: ckpt.restore(path, model=STATE, **more),
            "Checkpointer.save": lambda **more: run.save(0, model=STATE, **more),
            "Checkpointer.save of a state": lambda **more: run.save(0, STATE, **more),
            "restore_latest of nothing": lambda **more: run.restore_latest(model=STATE, **more),
        }
    assert not (tmp_path / "b").exists()
    assert run.all_steps() == []


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_options(calls, name):
    for call in calls.values():
        with pytest.raises(
            TypeError, match=rf"{name}= is a setting.*options=ckpt\.Options\({name}="
        ):
            call(**{name: 3})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_a_checkpointer(calls, name):
    for call in calls.values():
        with pytest.raises(TypeError, match=rf"{name}= is an argument of ckpt\.Checkpointer"):
            call(**{name: 3})


@pytest.mark.parametrize(
    ("typo", "meant", "of"),
    [
        ("overwite", "overwrite", "save"),
        ("metric", "metrics", "save"),
        ("forse", "force", "save"),
        ("metdata", "metadata", "save"),
        ("opions", "options", "any"),
        ("optoins", "options", "any"),
        ("mising", "missing", "restore"),
        ("ony", "only", "restore"),
        ("unexpectd", "unexpected", "restore"),
        ("compresion", "compression", "any"),
        ("timeout_sec", "timeout_secs", "any"),
    ],
)
def test_a_typo(calls, typo, meant, of):
    for name, call in calls.items():
        if of == "any" or of in name:
            with pytest.raises(
                TypeError, match=f"{typo}. looks like the (argument|setting) '{meant}'"
            ):
                call(**{typo: 3})


def test_by_items_any_name_is_one(tmp_path: Path):
    items = {name: STATE for name in (*FIELDS, "overwite", "max_to_keep", "ony")}
    ckpt.save(tmp_path / "a", items=items)
    assert ckpt.load(tmp_path / "a").keys() == items.keys()
    assert ckpt.restore(tmp_path / "a", items=items).keys() == items.keys()


@pytest.mark.parametrize(
    "name", ["name", "model", "step", "rng", "data", "config", "params", "ema", "tag", "loss"]
)
def test_ordinary_names(tmp_path: Path, name: str):
    ckpt.save(tmp_path / "a", **{name: STATE})
    assert name in ckpt.restore(tmp_path / "a", **{name: STATE})
