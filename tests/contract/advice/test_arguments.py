"""Arguments and settings in the wrong place, misspelt, or of another type."""

import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_orbax as ocp
from ckpt_orbax import flax_checkpoints, v1
from tests.contract.advice.said import told
from tests.contract.advice.test_saving import FAST, OTHER, STATE, holds, holds_item, save

NOW = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)


@pytest.mark.parametrize("name", ["mising", "missing", "unexpectd", "as_numpy"])
def test_arguments_of_a_restore_are_no_items(tmp_path, name):
    with told("of restore and load, and a save has none: pass ") as said:
        save(tmp_path / "a", model=STATE, **{name: True})
    argument = said.between("has none: pass ", "=")
    save(tmp_path / "a", model=STATE)
    value = True if argument == "as_numpy" else "ignore" if argument == "unexpected" else "keep"
    like = None if argument == "as_numpy" else STATE
    assert ckpt.load(tmp_path / "a", like, item="model", **{argument: value}) is not None
    given = said.text.rpartition("passed as items=")[2].replace("...", "STATE")
    save(tmp_path / "b", items=eval(given, {"STATE": STATE}))
    assert holds_item(tmp_path / "b", name)


def test_arguments_of_another_call(tmp_path):
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


def test_a_step_by_keyword(tmp_path):
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
        *(("storage_options", 3), ("local_max_to_keep", "2"), ("max_host_bytes", None)),
        ("persist_policy", 1000),
    ],
)
def test_settings_of_another_type(name, value):
    with pytest.raises(TypeError, match=f"Options.{name} ") as caught:
        ckpt.Options(**{name: value})
    assert repr(value) in str(caught.value)


def test_items_without_names(tmp_path):
    for call in (ckpt.save, ckpt.restore):
        for items in ([STATE], STATE["w"]):
            with told(": write items={'model': ...}") as said:
                call(tmp_path / "a", items=items)  # pyright: ignore
    given = eval(said.after("write items=").replace("...", "STATE"), {"STATE": STATE})
    save(tmp_path / "a", items=given)
    assert holds_item(tmp_path / "a", "model")


def test_arguments_of_a_restore_of_another_type(tmp_path):
    save(tmp_path / "a", model=STATE)
    pairs: Any = [("w", "v")]
    with told("rename= is a dict of saved paths and wanted ones, or a function of"):
        ckpt.restore(tmp_path / "a", model=OTHER, rename=pairs)
    restored = ckpt.restore(tmp_path / "a", model={"v": OTHER["w"]}, rename=dict(pairs))
    assert (restored["model"]["v"] == STATE["w"]).all()
    number: Any = 3
    with pytest.raises(TypeError, match="only= is a pattern, several, or a function"):
        ckpt.restore(tmp_path / "a", model=OTHER, only=number)


def test_a_random_key_is_not_cast(tmp_path):
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
            lambda path, **named: ocp.CheckpointManager(path.parent / "o", None, NOW).save(
                0, **named
            ),
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
def test_an_argument_that_is_misspelt(tmp_path, call, wrong, value):
    save(tmp_path / "3", STATE)
    with told(": write ", of=TypeError) as said:
        call(tmp_path / "3", **{wrong: value})
    assert f"has no argument {wrong!r}" in said.text
    assert call(tmp_path / "3", **{said.between(": write ", "=..."): value}) is not None


@pytest.mark.parametrize("call", [ckpt.load, ckpt.load_async])
def test_a_target_by_name(tmp_path, call):
    save(tmp_path / "a", STATE)
    with told("like comes without a name: write ", of=TypeError) as said:
        call(tmp_path / "a", like=OTHER)
    names = {call.__name__: call, "path": tmp_path / "a", "like": OTHER}
    assert eval(said.after("write ").replace("...", "path"), names) is not None


def at_all_loads(root: Path) -> list[Any]:
    """Each way to load without a target, called with further arguments."""
    return [
        lambda **more: ckpt.load(root / "run" / "3", **more),
        lambda **more: ckpt.load_async(root / "run" / "3", **more).result(),
        lambda **more: ckpt.Checkpointer(root / "run").load(3, **more),
    ]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("missing", "keep"), ("unexpected", "ignore"), ("cast", True), ("cast", "nonsense")),
        *(("cast", jnp.int8), ("cast", None), ("as_numpy", "yes"), ("as_numpy", np.ones(2))),
        *(("item", 3), ("options", {"durable": "no"}), ("options", {"checksum": True})),
    ],
)
def test_an_argument_that_a_load_without_a_target_cannot_use(tmp_path, argument, value):
    save(tmp_path / "run" / "3", STATE)
    for call in at_all_loads(tmp_path):
        with pytest.raises(TypeError, match=argument if argument != "options" else "Options"):
            call(**{argument: value})
        assert call(as_numpy=1, cast=False, missing="error")["w"].shape == (4,)


def test_a_dtype_for_a_load_without_a_target(tmp_path):
    with told("cast=jnp.bfloat16 gives all floats in that dtype", of=TypeError) as said:
        ckpt.load(tmp_path / "a", cast=True)
    exact = {"w": jnp.arange(3.0), "n": np.arange(4.0), "big": np.arange(5, dtype=">f4")}
    others = {"step": jnp.arange(2), "key": jax.random.key(1), "rate": 0.1, "z": np.ones(1, "c8")}
    save(tmp_path / "run" / "3", {**exact, **others})
    given = eval(f"dict({said.between('Without one ', ' gives')})", {"jnp": jnp})
    for call in at_all_loads(tmp_path):
        for more in ({}, {"as_numpy": True}, {"only": ["w", "n", "step"]}):
            found = call(**given, **more)
            for name, value in found.items():
                saved = exact.get(name, others.get(name))
                if name in exact:
                    assert value.dtype == jnp.bfloat16 and np.array_equal(value, saved)
                elif name != "key":
                    assert getattr(value, "dtype", None) == getattr(saved, "dtype", None)
    with told("cast= beside a target is True or False", of=TypeError):
        ckpt.load(tmp_path / "run" / "3", {**exact, **others}, **given)


FLAGS = [
    (lambda root, run, **flag: ckpt.save(root / "a", STATE, **flag), "overwrite"),
    (lambda root, run, **flag: ckpt.save_async(root / "a", STATE, **flag), "overwrite"),
    (lambda root, run, **flag: ckpt.writer(root / "a", **flag), "overwrite"),
    (lambda root, run, **flag: run.save(1, STATE, **flag), "overwrite"),
    (lambda root, run, **flag: run.save(1, STATE, **flag), "force"),
    (lambda root, run, **flag: run.restore_latest(STATE, **flag), "strict_latest"),
    (lambda root, run, **flag: run.restore_latest(STATE, **flag), "cast"),
    (lambda root, run, **flag: run.restore(0, STATE, **flag), "cast"),
    (lambda root, run, **flag: ckpt.restore(root / "run" / "0", STATE, **flag), "cast"),
    (lambda root, run, **flag: ckpt.Checkpointer(root / "run", **flag), "asynchronous"),
    (lambda root, run, **flag: ckpt.Checkpointer(root / "run", **flag), "read_only"),
]


@pytest.mark.parametrize(("call", "flag"), FLAGS)
def test_a_text_is_not_taken_for_true(tmp_path, call, flag):
    with ckpt.Checkpointer(tmp_path / "run", options=FAST) as run:
        run.save(0, STATE)
        run.wait_until_finished()
        save(tmp_path / "a", OTHER)
        for value in ("no", "", None, np.zeros(2), 2):
            with pytest.raises(TypeError, match=f"{flag}.* True or False"):
                call(tmp_path, run, **{flag: value})
    assert holds(tmp_path / "a", OTHER["w"]) and ckpt.Checkpointer(
        tmp_path / "run"
    ).all_steps() == [0]


def test_help_shows_no_comment_of_the_source():
    for name in ckpt.__all__:
        for member in vars(getattr(ckpt, name)).values():
            if inspect.isfunction(member) and member.__module__.startswith("ckpt_core"):
                assert inspect.getdoc(member) or not inspect.getcomments(member), (name, member)


def test_arguments_of_orbax(tmp_path):
    model = STATE
    key = "of Orbax, and here a tree or an object is passed as it is: write "
    wrapped = [ocp.args.StandardSave(STATE), ocp.args.Composite(m=ocp.args.StandardSave(STATE))]
    with ckpt.Checkpointer(tmp_path / "run", options=FAST) as run:
        for one in wrapped:
            for call in (
                lambda one=one: run.save(0, args=one),
                lambda one=one: run.save(0, one),
                lambda one=one: run.save(0, items={"args": one}),
                lambda one=one: ckpt.save_async(tmp_path / "a", args=one),
            ):
                with told(key, of=TypeError) as said:
                    call()
        for n, written in enumerate(said.after("write ").split(" or ")):
            code = written.replace("...", str(n))
            assert eval(code, {"save": run.save, "state": STATE, "model": model})
        target = ocp.args.StandardRestore(OTHER)
        for call in (
            lambda: run.restore_latest(args=target),
            lambda: run.restore_latest(target),
            lambda: run.restore(0, args=target),
            lambda: run.load(0, target),
            lambda: ckpt.load_async(tmp_path / "run" / "0", target),
            lambda: ckpt.load(tmp_path / "run" / "0", target),
        ):
            with told(key, of=TypeError) as said:
                call()
    assert said.after("write ") == "load(..., like)"


@pytest.mark.parametrize("name", ["target", "model", "abstract_state", "state"])
def test_a_target_by_any_name(tmp_path, name):
    save(tmp_path / "run" / "3", STATE)
    save(tmp_path / "items", items={name: STATE})
    for call in at_all_loads(tmp_path):
        with told("A target comes without a name: write ", of=TypeError) as said:
            call(**{name: OTHER})
        one, _, of_item = said.after("write ").partition(
            ", or if it is the target of an item of that name "
        )
        given = {"load": ckpt.load, "load_async": ckpt.load_async, name: OTHER}
        assert eval(one.replace("...", "path"), {**given, "path": tmp_path / "run" / "3"})
        assert eval(of_item.replace("...", "path"), {**given, "path": tmp_path / "items"})
