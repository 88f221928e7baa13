"""Tracebacks of common mistakes: ckpt's part of them is short, each is one error, and its last line is the answer."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.paths import ROOT

STATE = {"w": jnp.ones(3), "b": np.ones(2)}
MISTAKES: dict[str, Callable[[], Any]] = {
    "exists": lambda: ckpt.save("state", STATE),
    "async": lambda: ckpt.save_async("state", STATE),
    "not_found": lambda: ckpt.load("nope"),
    "a_run": lambda: ckpt.load("run"),
    "shape": lambda: ckpt.load("state", {"w": jnp.ones(4), "b": np.ones(2)}),
    "dtype": lambda: ckpt.load("state", {"w": jnp.ones(3, "bfloat16"), "b": np.ones(2)}),
    "restore": lambda: ckpt.restore("items", model={"w": jnp.ones(4)}),
    "item": lambda: ckpt.load("items", item="modl"),
    "no_step": lambda: ckpt.Checkpointer("run").restore(9, model=STATE),
    "step": lambda: ckpt.Checkpointer("run").restore_latest(model={"w": jnp.ones(4)}),
    "forgotten_restore": lambda: ckpt.Checkpointer("run").save(0, model=STATE),
    "only": lambda: ckpt.load("state", only="parms/**"),
    "function": lambda: ckpt.save("new", {"f": test_it_is_short_and_one_error}),
    "function_in_item": lambda: ckpt.save("new", model={"f": test_it_is_short_and_one_error}),
    "argument": lambda: ckpt.save("new", STATE, overwite=True),
    "metadata": lambda: ckpt.save("new", STATE, metadata={"f": object()}),
    "url": lambda: ckpt.save("gs:/bucket/run", STATE),
}


@pytest.fixture(autouse=True)
def _saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ckpt.save("state", STATE)
    ckpt.save("items", model=STATE)
    with ckpt.Checkpointer("run") as checkpointer:
        checkpointer.save(0, model=STATE)


def _frames(error: BaseException) -> list[str]:
    """Functions of ckpt in the traceback, from the call on."""
    stack = traceback.extract_tb(error.__traceback__)
    return [one.name for one in stack if one.filename.startswith(str(ROOT / "ckpt_core"))]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_short_and_one_error(mistake):
    with pytest.raises(Exception) as raised:
        MISTAKES[mistake]()
    assert len(_frames(raised.value)) <= 5
    if isinstance(raised.value, ckpt.CheckpointError) and mistake != "url":
        assert len(_frames(raised.value)) == 1
    told = "".join(traceback.format_exception(raised.value))
    assert "During handling" not in told and "direct cause" not in told


@pytest.mark.parametrize("path", ["nowhere", "state"])
def test_frames_of_the_users_own_code_stay(path):
    class Mine:
        def get_state(self) -> Any:
            raise ckpt.UnsupportedLeaf("no state yet", leaf=str(ckpt.load(path)), type_name="Mine")

        def set_state(self, state: Any) -> None: ...

    with pytest.raises((ckpt.UnsupportedLeaf, ckpt.CheckpointNotFound)) as raised:
        ckpt.save("new", model=Mine())
    assert "get_state" in [one.name for one in traceback.extract_tb(raised.value.__traceback__)]


def test_frames_of_damage_stay():
    for data in Path("state").rglob("d/*"):
        data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ckpt.CheckpointCorrupt) as raised:
        ckpt.load("state")
    assert len(_frames(raised.value)) > 3
