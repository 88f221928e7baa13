"""Arguments and settings in the wrong place, misspelt, or of another type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_orbax as ocp
from ckpt_orbax import flax_checkpoints, v1
from tests.contract.advice.said import told
from tests.contract.advice.test_saving import FAST, OTHER, STATE, holds_item, save


@pytest.mark.parametrize("name", ["mising", "missing", "unexpectd", "as_numpy"])
def test_arguments_of_a_restore_are_no_items(tmp_path: Path, name: str):
    with told("of restore and load, and a save has none: pass ") as said:
        save(tmp_path / "a", model=STATE, **{name: True})
    argument = said.between("has none: pass ", "=")
    save(tmp_path / "a", model=STATE)
    value = True if argument == "as_numpy" else "ignore" if argument == "unexpected" else "keep"
    assert ckpt.load(tmp_path / "a", item="model", **{argument: value}) is not None
    given = said.text.rpartition("passed as items=")[2].replace("...", "STATE")
    save(tmp_path / "b", items=eval(given, {"STATE": STATE}))
    assert holds_item(tmp_path / "b", name)


def test_arguments_of_another_call(tmp_path: Path):
    key = ", and not of this one: pass it there; "
    with told(key) as said:
        ckpt.save(tmp_path / "a", STATE, force=True)
    assert said.between("argument of ", ", and not") == "Checkpointer.save"
    with ckpt.Checkpointer(tmp_path / "run", options=FAST) as run:
        run.save(3, STATE)
        assert run.save(1, STATE, force=True)
        with told(key) as said:
            run.save(4, model=STATE, options=FAST)
    assert "ckpt.Checkpointer(...)" in said.text  # as above
    save(tmp_path / "b", model=STATE)
    with told(key) as said:
        ckpt.restore(tmp_path / "b", model=OTHER, as_numpy=True)
    assert said.between("argument of ", ", and not") == "load"
    assert ckpt.load(tmp_path / "b", item="model", as_numpy=True) is not None


def test_a_step_by_keyword(tmp_path: Path):
    with ckpt.Checkpointer(tmp_path / "run", options=FAST) as run:
        for name, more in (("save", {"model": STATE}), ("load", {}), ("restore", {"model": OTHER})):
            call: Any = getattr(run, name)
            with told("the step comes first, without a name: write ") as said:
                call(step=7, **more)
            assert said.after("write ") == f"{name}(7, ...)"
            given = call(7, **more)
        assert run.should_save(step=9) and run.metrics(step=7) == {}  # where no item can be meant
        run.save(8, model=given["model"], step=np.int32(8))  # an item may have that name
        assert run.load(8, item="step") == 8
        run.delete(step=8)
        assert run.rollback_to(step=6) == [7] and run.all_steps() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("grace_secs", "30"), ("chunk_bytes", "1MB"), ("timeout_secs", "2"), ("durable", "no")),
        *(("on_event", "x"), ("stop_signals", "SIGTERM"), ("trash_directory", 3)),
        *(("storage_options", "x"), ("local_max_to_keep", "2")),
    ],
)
def test_settings_of_another_type(name: str, value: Any):
    with pytest.raises(TypeError, match=f"Options.{name} ") as caught:
        ckpt.Options(**{name: value})
    assert repr(value) in str(caught.value)


def test_a_setting_that_is_gone_says_what_does_its_work() -> None:
    with pytest.raises(TypeError, match="local_max_bytes: `ckpt rm --local DIRECTORY` removes"):
        ckpt.Options(**{"local_max_bytes": 2**30})


def test_arguments_that_a_checkpointer_does_not_have(tmp_path: Path):
    named: dict[str, Any] = {"max_to_kep": 1}
    with told(": write ") as said:
        ckpt.Checkpointer(tmp_path / "run", **named)
    written = said.after("write ").replace("...", "1")
    with eval(
        f"ckpt.Checkpointer(path, {written})", {"ckpt": ckpt, "path": tmp_path / "run"}
    ) as run:
        for step in range(3):
            run.save(step, STATE)
        run.wait_until_finished()
        assert run.all_steps() == [2]
    for name in ("compression", "compresion"):
        named = {name: "zstd"}
        with told(": write options=ckpt.Options(") as said:
            ckpt.Checkpointer(tmp_path / "run", **named)
        written = said.after("write ").replace("...", "'zstd'")
        made = eval(f"ckpt.Checkpointer(path, {written})", {"ckpt": ckpt, "path": tmp_path / "b"})
        made.close()
    with pytest.raises(TypeError, match="lists all"):
        ckpt.Checkpointer(tmp_path / "run", **{"zzz": 1})


def test_items_without_names(tmp_path: Path):
    for call in (ckpt.save, ckpt.restore):
        for items in ([STATE], STATE["w"]):
            with told(": write items={'model': ...}") as said:
                call(tmp_path / "a", items=items)  # pyright: ignore
    given = eval(said.after("write items=").replace("...", "STATE"), {"STATE": STATE})
    save(tmp_path / "a", items=given)
    assert holds_item(tmp_path / "a", "model")


def test_arguments_of_a_restore_of_another_type(tmp_path: Path):
    save(tmp_path / "a", model=STATE)
    pairs: Any = [("w", "v")]
    with told("rename= is a dict of saved paths and wanted ones, or a function of"):
        ckpt.restore(tmp_path / "a", model=OTHER, rename=pairs)
    restored = ckpt.restore(tmp_path / "a", model={"v": OTHER["w"]}, rename=dict(pairs))
    assert (restored["model"]["v"] == STATE["w"]).all()
    number: Any = 3
    with pytest.raises(TypeError, match="only= is a pattern, several, or a function"):
        ckpt.restore(tmp_path / "a", model=OTHER, only=number)


def test_a_random_key_is_not_cast(tmp_path: Path):
    """``cast=True`` was advised, and does not convert one kind of key into another."""
    save(tmp_path / "a", {"k": jax.random.key(0), "w": np.ones(2)})
    other = jax.random.key(0, impl="rbg")
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", {"k": other, "w": np.zeros(2)})
    assert "cast=" not in str(caught.value)
    with pytest.raises(ckpt.StructureMismatch, match="cast=True converts dtypes"):
        ckpt.restore(tmp_path / "a", {"k": other, "w": np.zeros(2, np.float32)})


@pytest.mark.parametrize(
    ("call", "wrong", "value"),
    [
        (lambda path, **named: ckpt.load(path, **named), "ony", "w"),
        (lambda path, **named: ckpt.load_async(path, **named).result(), "ony", "w"),
        (lambda path, **named: ckpt.Checkpointer(path.parent).load(3, **named), "ony", "w"),
        (lambda path, **named: ckpt.verify(path, **named), "option", FAST),
        (lambda _, **named: ocp.CheckpointManagerOptions(**named), "max_to_kep", 2),
        (lambda _, **named: ocp.PyTreeCheckpointer(**named), "use_ocdb", True),
        (lambda _, **named: ocp.args.PyTreeRestore(**named), "restore_arg", None),
        (lambda _, **named: ocp.PyTreeCheckpointHandler(**named), "use_ocdb", True),
        (
            lambda _, **named: ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), **named),
            "file_option",
            None,
        ),
        (
            lambda path, **named: ocp.CheckpointManager(path.parent / "o").save(0, **named),
            "arg",
            ocp.args.StandardSave(STATE),
        ),
        (
            lambda path, **named: flax_checkpoints.restore_checkpoint(path.parent, None, **named),
            "prefx",
            "",
        ),
        (lambda _, **named: v1.options.ArrayOptions.Saving(**named), "use_ocdb", True),
    ],
)
def test_an_argument_that_is_misspelt(tmp_path: Path, call: Any, wrong: str, value: Any):
    save(tmp_path / "3", STATE)
    with told(": write ", of=TypeError) as said:
        call(tmp_path / "3", **{wrong: value})
    assert f"has no argument {wrong!r}" in said.text
    assert call(tmp_path / "3", **{said.between(": write ", "=..."): value}) is not None


@pytest.mark.parametrize("call", [ckpt.load, ckpt.load_async])
def test_a_target_by_name(tmp_path: Path, call: Any):
    save(tmp_path / "a", STATE)
    with told("like comes without a name: write ", of=TypeError) as said:
        call(tmp_path / "a", like=OTHER)
    names = {call.__name__: call, "path": tmp_path / "a", "like": OTHER}
    assert eval(said.after("write ").replace("...", "path"), names) is not None
