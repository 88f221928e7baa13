"""What is still alive after a call has ended, well or not; and what the caller may change meanwhile."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._background import pending as pending_module
from tests.support import seams

QUICK = ckpt.Options(durable=False)
LONG_SECS = 60


def state() -> tuple[dict[str, Any], list[Any]]:
    """A state, and weak references to what it is made of."""
    arrays = {"jax": jnp.ones(50_000) * 2, "numpy": np.ones(50_000)}
    small = {"jax": jnp.ones(3) * 3, "numpy": np.ones(3)}
    tree = {"large": arrays, "small": small}
    return tree, [weakref.ref(leaf) for part in tree.values() for leaf in part.values()]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.at(monkeypatch, "record", before=seams.fail(OSError, 28, "the disk is full"))


def assert_gone(references: list[Any]) -> None:
    gc.collect()
    alive = [reference() for reference in references if reference() is not None]
    if alive:  # of what tests/conftest.py froze no referrer is named
        gc.unfreeze()
    assert not alive, [gc.get_referrers(value) for value in alive]


def _save_async(path: Path, tree: Any) -> Callable[[], Any]:
    return ckpt.save_async(path, tree, options=QUICK).result


def _checkpointer(path: Path, tree: Any) -> Callable[[], Any]:
    checkpointer = ckpt.Checkpointer(path, options=QUICK)
    checkpointer.save(0, tree)
    return checkpointer.wait_until_finished


def _tiers(path: Path, tree: Any) -> Callable[[], Any]:
    checkpointer = ckpt.Checkpointer(path / "far", local_directory=path / "near", options=QUICK)
    checkpointer.save(0, tree)
    return checkpointer.wait_until_finished


SAVES = [_save_async, _checkpointer, _tiers]


@pytest.mark.parametrize("save", SAVES)
def test_a_raised_failure_holds_nothing(save: Any, full_disk: None, tmp_path: Path) -> None:
    tree, references = state()
    wait = save(tmp_path / "a", tree)
    del tree
    with pytest.raises(OSError, match="the disk is full"):
        wait()
    assert_gone(references)  # though whoever waited, and could wait again, is still there
    assert wait


@pytest.mark.parametrize("save", [_save_async])
def test_a_failure_that_nobody_asked_about_holds_no_arrays(
    save: Any, full_disk: None, tmp_path: Path
) -> None:
    tree, references = state()
    wait = save(tmp_path / "a", tree)
    del tree
    (pending,) = pending_module._unfinished
    assert pending.wait(LONG_SECS)
    assert_gone(references)
    with pytest.raises(OSError, match="the disk is full") as caught:
        wait()
    frames = "".join(str(entry) for entry in caught.traceback)
    assert "_commit" in frames  # where it happened is still known
    with pytest.raises(OSError, match="the disk is full"):
        wait()  # and raised again for whoever asks again
    assert not [one for one in pending_module._unfinished if one.unreported]


@pytest.mark.parametrize("save", SAVES)
def test_a_save_that_ended_well_holds_nothing(save: Any, tmp_path: Path) -> None:
    tree, references = state()
    wait = save(tmp_path / "a", tree)
    del tree
    wait()
    assert_gone(references)
    assert wait


def test_failures_do_not_add_up(full_disk: None, tmp_path: Path) -> None:
    every: list[Any] = []
    for number in range(5):
        tree, references = state()
        every += references
        with pytest.raises(OSError):
            ckpt.save_async(tmp_path / str(number), tree, options=QUICK).result()
        del tree
    assert_gone(every)
    assert len(pending_module._unfinished) <= 1


@pytest.mark.parametrize("failing", [False, True])
def test_what_was_loaded_belongs_to_the_caller(failing: bool, tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", {"w": jnp.ones(50_000), "v": jnp.ones(3)}, options=QUICK)
    pending = ckpt.load_async(tmp_path / "a", {"w": jnp.zeros(7)} if failing else None)
    if failing:
        with pytest.raises(ckpt.StructureMismatch):
            pending.result()
        assert not [one for one in pending_module._unfinished if one.unreported]
        return
    loaded = pending.result()
    references = [weakref.ref(leaf) for leaf in loaded.values()]
    del pending, loaded
    assert_gone(references)


def test_a_target_of_a_load_is_let_go(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", {"w": jnp.ones(50_000)}, options=QUICK)
    like = {"w": jnp.zeros(50_000)}
    references = [weakref.ref(like["w"])]
    pending = ckpt.load_async(tmp_path / "a", like)
    pending.result()
    del like
    assert_gone(references)
    assert pending.done()


# ---- what the caller changes right after the call ---------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> seams.Gate:
    """Holds the thread of a save or load at its beginning."""
    made = seams.Gate()
    seams.at(monkeypatch, (pending_module.Pending, "_run"), before=made)
    return made


METADATA = {"epoch": 1, "nested": {"list": [1, {"a": 2}]}}


def _changed(metadata: dict[str, Any]) -> None:
    metadata["epoch"] = object()  # what JSON cannot hold: it must not even be looked at any more
    metadata["nested"]["list"][1]["a"] = 9
    metadata["nested"]["list"].append(9)


@pytest.mark.parametrize("how", ["save_async", "Checkpointer", "tiers"])
def test_metadata_metrics_and_items_changed_right_after(
    how: str, gate: seams.Gate, tmp_path: Path
) -> None:
    metadata: dict[str, Any] = {"epoch": 1, "nested": {"list": [1, {"a": 2}]}}
    metrics, tree = {"loss": 0.5}, {"n": 1, "list": [1, 2], "text": "a"}
    items: dict[str, Any] = {"tree": tree}
    if how == "save_async":
        wait = ckpt.save_async(tmp_path / "0", items=items, metadata=metadata, options=QUICK).result
    else:
        local = tmp_path / "near" if how == "tiers" else None
        checkpointer = ckpt.Checkpointer(tmp_path, local_directory=local, options=QUICK)
        checkpointer.save(0, items=items, metadata=metadata, metrics=metrics)
        wait = checkpointer.close
    _changed(metadata)
    metrics["loss"] = 9.0
    tree["n"], tree["new"] = 9, 9
    tree["list"].append(9)
    items["more"] = 9
    gate.go.set()
    wait()
    info = ckpt.inspect(tmp_path / "0")
    assert info.metadata == METADATA
    assert info.metrics == ({} if how == "save_async" else {"loss": 0.5})
    assert ckpt.load(tmp_path / "0") == {"tree": {"n": 1, "list": [1, 2], "text": "a"}}


def test_options_changed_right_after(gate: seams.Gate, tmp_path: Path) -> None:
    compression: dict[str, str | None] = {"w": "zstd"}
    options = ckpt.Options(durable=False, compression=compression)
    pending = ckpt.save_async(tmp_path / "0", {"w": np.zeros(100_000)}, options=options)
    compression["w"] = "no such codec"
    gate.go.set()
    pending.result()
    files = (tmp_path / "0").rglob("*")
    assert sum(file.stat().st_size for file in files if file.is_file()) < 100_000


def test_the_arguments_of_a_load_changed_right_after(gate: seams.Gate, tmp_path: Path) -> None:
    saved = {"a": {"w": jnp.ones(3)}, "b": [jnp.ones(2), (jnp.zeros(2), {"c": 1})]}
    ckpt.save(tmp_path / "0", saved, options=QUICK)
    like: Any = {"a": {"w": jnp.zeros(3)}, "b": [jnp.zeros(2), (jnp.zeros(2), {"c": 0})]}
    only, rename = ["a/**", "b/**"], {"a": "a"}
    pending = ckpt.load_async(tmp_path / "0", like, only=only, rename=rename)
    like["a"].clear()
    like["b"][1][1]["d"] = 3
    like["b"].append(1)
    del like["b"][0]
    only.clear()
    rename["a"] = "z"
    gate.go.set()
    loaded = pending.result()
    assert loaded["b"][1][1] == {"c": 1} and (loaded["a"]["w"] == 1).all()


def test_policies_keep_the_steps_that_they_were_given(tmp_path: Path) -> None:
    at, kept = [0, 2, 4], [0]
    policy, keep = ckpt.when.at_steps(at), ckpt.keep.steps(kept) | ckpt.keep.latest(1)
    at.append(3)
    kept.append(2)
    with ckpt.Checkpointer(
        tmp_path, save_policy=policy, keep_policy=keep, options=QUICK
    ) as checkpointer:
        began = [step for step in range(5) if checkpointer.save(step, {"n": step})]
    assert began == [0, 2, 4] and checkpointer.all_steps() == [0, 4]
