"""What ``ckpt_orbax`` and ``ckpt_orbax.v1`` refuse, and what their messages say to do."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
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

W = np.arange(4.0, dtype=np.float32)
STATE = {"w": W, "b": W + 1}
Standard = ocp.args.StandardSave


def manager(directory: Any, **options: Any) -> Any:
    return ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(**options))


def right(value: Any) -> bool:
    return np.array_equal(value["w"], W)


# The first API


def test_a_step_that_is_there(tmp_path: Path):
    with manager(tmp_path) as one:
        one.save(3, args=Standard({"w": W * 0}))
        one.wait_until_finished()
        with told("orbax/ckpt_orbax/v0/checkpoint_manager.py: ) first") as said:
            one.save(3, args=Standard(STATE), force=True)
        eval(f"one.{said.between('exists: ', ' first')}", {"one": one})
        one.save(3, args=Standard(STATE), force=True)
    with manager(tmp_path) as again:
        assert right(again.restore(3))


def test_arguments_of_a_save(tmp_path: Path):
    names = {"ocp": ocp, "tree": STATE, "state": Standard(STATE)}
    with manager(tmp_path / "a") as one:
        with pytest.raises(ValueError, match=r"such as ocp\.args\.StandardSave") as caught:
            one.save(0)
        args = eval(str(caught.value).rpartition("such as ")[2], names)
        with told(
            "orbax/ckpt_orbax/v0/checkpoint_manager.py: , the earlier form: write args=ocp.args"
        ):
            one.save(0, args)
        one.save(0, args=args)
        key = "orbax/ckpt_orbax/v0/checkpoint_manager.py: checkpointable object. Give the arguments of the object"
        with told(key):
            one.restore(0, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
        assert right(one.restore(0, args=ocp.args.StandardRestore()))
    with manager(tmp_path / "b") as one:
        one.save(0, args=ocp.args.Composite(state=Standard(STATE)))
        with told(
            "orbax/ckpt_orbax/v0/checkpoint_manager.py: objects. Write args=ocp.args.Composite("
        ) as said:
            one.save(1, args=Standard(STATE))
        how = eval(f"dict({said.after('Write ')})".replace("...", "state"), names)
        one.save(1, **how)
    with manager(tmp_path / "b") as again:
        restored = again.restore(1, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
        assert right(restored["state"])


def test_what_is_no_tree(tmp_path: Path):
    checkpointer = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    with told(
        "orbax/ckpt_orbax/v0/_saving.py: does not support single arrays or scalars: use ArraySave"
    ):
        checkpointer.save(tmp_path / "a", args=Standard(jnp.arange(4.0)))
    with manager(tmp_path / "b") as one:
        one.save(0, args=ocp.args.ArraySave(jnp.arange(4.0)))
    with manager(tmp_path / "b") as again:
        assert np.array_equal(again.restore(0, args=ocp.args.ArrayRestore()), W)


def test_several_items_and_one_handler(tmp_path: Path):
    ckpt.save(tmp_path / "a", one=STATE, two=STATE)
    with told("orbax/ckpt_orbax/v0/checkpointers.py: : give the path of one of them, or use a"):
        ocp.Checkpointer(ocp.StandardCheckpointHandler()).restore(tmp_path / "a")
    one = ocp.Checkpointer(ocp.StandardCheckpointHandler()).restore(tmp_path / "a" / "one")
    both = ocp.Checkpointer(ocp.CompositeCheckpointHandler()).restore(
        tmp_path / "a", args=ocp.args.Composite(two=ocp.args.StandardRestore())
    )
    assert right(one) and right(both["two"])


@pytest.mark.parametrize("action", ["PLACEHOLDER", "partial"])
def test_leaves_that_are_not_wanted(tmp_path: Path, action: str):
    ocp.PyTreeCheckpointer().save(tmp_path / "a", STATE)
    target = {"w": W * 0}
    with told(
        "orbax/ckpt_orbax/v0/_restoring.py: ocp.PLACEHOLDER in their place, or ocp.args.Py"
    ) as said:
        ocp.PyTreeCheckpointer().restore(tmp_path / "a", item=target)
    assert "unexpected=" not in said.text, "no argument of this function"
    if action == "PLACEHOLDER":
        assert right(
            ocp.PyTreeCheckpointer().restore(tmp_path / "a", item={**target, "b": ocp.PLACEHOLDER})
        )
    else:
        call = said.after("place, or ").replace("(", "(item=target, ")
        args = eval(call, {"ocp": ocp, "target": target})
        restored = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(
            tmp_path / "a", args=args
        )
        assert right(restored) and len(restored) == 1


def test_leaves_that_were_not_saved(tmp_path: Path):
    ocp.PyTreeCheckpointer().save(tmp_path / "a", {"w": W})
    with told(
        "orbax/ckpt_orbax/_trees.py: cannot be restored: leave it out of what is asked for"
    ) as said:
        ocp.PyTreeCheckpointer().restore(tmp_path / "a", item={"w": W * 0, "b": W})
    assert "missing=" not in said.text, "no argument of this function"
    assert right(ocp.PyTreeCheckpointer().restore(tmp_path / "a", item={"w": W * 0}))
    call = said.after("there: ").replace("(", "({'w': W * 0, 'b': W + 1}, ", 1)
    args = eval(call, {"ocp": ocp, "W": W})
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    restored = checkpointer.restore(tmp_path / "a", args=args)
    assert right(restored) and np.array_equal(restored["b"], W + 1)


@pytest.mark.parametrize("target", [{"w": W * 0, "new": W}, {"w": W * 0}])
def test_leaves_that_a_standard_restore_cannot_leave(tmp_path: Path, target: Any):
    with manager(tmp_path) as one:
        one.save(0, args=Standard(STATE))
        one.wait_until_finished()
        key = "orbax/ckpt_orbax/v0/_restoring.py: restore(path, item=target, partial_restore=True)"
        with told(key) as said:
            one.restore(0, args=ocp.args.StandardRestore(target))
    call = said.after(": ").partition(", with the path")[0]
    names = {"ocp": ocp, "path": tmp_path / "0" / "default", "target": target}
    restored = eval(call, names)
    assert right(restored) and restored.keys() == target.keys()


def test_lists_of_another_length(tmp_path: Path):
    saved = {"l": [W, W + 1, W + 2]}
    ocp.PyTreeCheckpointer().save(tmp_path / "a", saved)
    with told("orbax/ckpt_orbax/v0/_tree_targets.py: PLACEHOLDER in its place") as said:
        target = {"l": [W, W]}
        ocp.PyTreeCheckpointer().restore(tmp_path / "a", item=target, partial_restore=True)
    place = eval(said.between("put ", " in its place"), {"ocp": ocp})
    target = {"l": [W, place, place]}
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "a", item=target, partial_restore=True)
    assert np.array_equal(found["l"][0], W) and found["l"][1:] == [...] * 2


def test_transforms(tmp_path: Path):
    ocp.PyTreeCheckpointer().save(tmp_path / "a", STATE)
    with told(
        "orbax/ckpt_orbax/v0/_tree_targets.py: leaves; or restore the saved tree, and change"
    ) as said:
        ocp.PyTreeCheckpointer().restore(tmp_path / "a", item={"v": W}, transforms={"v": 1})
    call = said.between("Instead: ", " for other names").replace("...", "{'w': 'v'}")
    names = {"ckpt_core": ckpt, "path": tmp_path / "a", "like": {"v": W * 0, "b": W * 0}}
    assert np.array_equal(eval(call, names)["v"], W)
    saved = ocp.PyTreeCheckpointer().restore(tmp_path / "a")
    assert right({"w": saved.pop("w")})
    with told("orbax/ckpt_orbax/v0/_tree_targets.py: : give jax.Array, np.ndarray or a type of"):
        ocp.PyTreeCheckpointer().restore(
            tmp_path / "a",
            restore_args={"w": ocp.RestoreArgs(restore_type=dict), "b": ocp.RestoreArgs()},
        )
    for kind in (jax.Array, np.ndarray):
        wanted = {"w": ocp.RestoreArgs(restore_type=kind), "b": ocp.RestoreArgs()}
        back = ocp.PyTreeCheckpointer().restore(tmp_path / "a", restore_args=wanted)
        assert right(back) and isinstance(back["w"], kind)


@dataclasses.dataclass
class TextSave(ocp.args.CheckpointArgs):
    item: str


class Text(ocp.CheckpointHandler):
    def save(self, directory: Any, args: Any) -> None:
        (directory / "text").write_text(args.item)

    def restore(self, directory: Any, args: Any = None) -> str:
        return (directory / "text").read_text()


def test_handlers_that_are_not_registered(tmp_path: Path):
    with (
        told("orbax/ckpt_orbax/v0/_registration.py: : use ocp.args.register_with_handler") as said,
        manager(tmp_path / "a") as one,
    ):
        one.save(0, args=TextSave("mine"))
    register = eval(said.after("use "), {"ocp": ocp})
    register(Text, for_save=True, for_restore=True)(TextSave)
    with manager(tmp_path / "b") as one:
        one.save(0, args=TextSave("mine"))
    with manager(tmp_path / "b") as again:
        assert again.restore(0, args=TextSave("")) == "mine"


def test_settings_of_handlers_and_managers(tmp_path: Path):
    with told(
        "orbax/ckpt_orbax/v0/handlers.py: ; ckpt stores OCDBT and zarr3, which Orbax reads"
    ) as said:
        ocp.JsonCheckpointHandler(primary_host=1)
    value = eval(said.between("leave it at ", ";"))
    handler = ocp.JsonCheckpointHandler(primary_host=value)
    ocp.Checkpointer(handler).save(tmp_path / "a", {"a": 1})
    assert ocp.Checkpointer(handler).restore(tmp_path / "a") == {"a": 1}
    with told("orbax/ckpt_orbax/v0/manager_options.py: keep_period and keep_time_interval: give"):
        manager(
            tmp_path / "x",
            max_to_keep=2,
            preservation_policy=ocp.checkpoint_managers.LatestN(2),
        )
    for number, how in enumerate(
        ({"max_to_keep": 2}, {"preservation_policy": ocp.checkpoint_managers.LatestN(2)})
    ):
        with manager(tmp_path / f"run{number}", **how) as one:
            for step in range(3):
                one.save(step, args=Standard(STATE))
        with manager(tmp_path / f"run{number}") as again:
            assert again.all_steps() == [1, 2]


def test_two_names_that_are_one(tmp_path: Path):
    with told("orbax/ckpt_orbax/_plain.py: as text: rename one of them"):
        ocp.PyTreeCheckpointer().save(tmp_path / "a", OrderedDict([(1, W), ("1", W)]))
    ocp.PyTreeCheckpointer().save(tmp_path / "a", OrderedDict([(1, W), ("2", W)]))
    assert set(ocp.PyTreeCheckpointer().restore(tmp_path / "a")) == {"1", "2"}


# The second API


class Counter:
    """A stateful checkpointable, as Orbax spells it."""

    def __init__(self, count: int = 0):
        self.count = count

    async def save(self, directory: Any) -> Any:
        count = self.count

        async def write() -> None:
            (await directory.await_creation() / "count").write_text(str(count))

        return write()

    async def load(self, directory: Any) -> Any:
        async def read() -> None:
            self.count = int((directory / "count").read_text())

        return read()


def test_an_object_that_sets_itself(tmp_path: Path):
    v1.save_checkpointables(tmp_path / "a", {"counter": Counter(3)})
    with told("orbax/ckpt_orbax/v1/_files.py: , you must pass an instance of the object.") as said:
        v1.load_checkpointables(tmp_path / "a", {"counter": None})
    target = Counter()
    asked = eval(said.after("Pass "), {"the_object": target})
    v1.load_checkpointables(tmp_path / "a", asked)
    assert target.count == 3


def test_names_that_are_taken(tmp_path: Path):
    with told("orbax/ckpt_orbax/v1/_names.py: ; choose another name"):
        v1.save_checkpointables(tmp_path / "a", {"metrics": STATE, "descriptor": STATE})
    v1.save_checkpointables(tmp_path / "a", {"mine": STATE})
    assert right(v1.load_checkpointables(tmp_path / "a")["mine"])


@pytest.mark.parametrize("action", ["PLACEHOLDER", "partial"])
def test_leaves_that_are_not_wanted_of_the_second(tmp_path: Path, action: str):
    v1.save(tmp_path / "a", STATE)
    with told(
        "orbax/ckpt_orbax/v1/loading.py: ocp.PLACEHOLDER in their place, or context.pytree."
    ) as said:
        v1.load(tmp_path / "a", {"w": W * 0})
    assert "unexpected=" not in said.text, "no argument of this function"
    if action == "PLACEHOLDER":
        assert right(v1.load(tmp_path / "a", {"w": W * 0, "b": v1.PLACEHOLDER}))
        return
    context = v1.Context()
    exec(said.after("place, or "), {"context": context})
    with context:
        assert right(v1.load(tmp_path / "a", {"w": W * 0}))


def test_a_context(tmp_path: Path):
    context = v1.Context()
    with told("orbax/ckpt_orbax/v1/_context.py: cannot be set: set the fields of Context."):
        context.pytree = v1.options.PyTreeOptions()
    context.pytree.loading.partial_load = True
    with (
        context,
        told("orbax/ckpt_orbax/v1/options.py: cannot change while its Context is active: set it"),
    ):
        context.pytree.loading.partial_load = False
    context.pytree.loading.partial_load = False
    v1.save(tmp_path / "a", STATE)
    with context:
        assert right(v1.load(tmp_path / "a"))
    refused = [
        ("array.saving.use_ocdbt", False),
        ("array.loading.enable_padding_and_truncation", True),
    ]
    for name, value in refused:
        context = v1.Context()
        holder: Any = context
        *parts, last = name.split(".")
        for part in parts:
            holder = getattr(holder, part)
        setattr(holder, last, value)
        with pytest.raises(ocp.NotOffered) as caught, context:
            v1.load(tmp_path / "a")
        covers = "orbax/ckpt_orbax/v1/_engine.py: load the saved shape, and slice or jnp.pad it"
        if "padding" in name:
            assert covers.partition(".py: ")[2] in str(caught.value)
            assert jnp.pad(v1.load(tmp_path / "a")["w"], (0, 1)).shape == (5,)
        else:
            setattr(holder, last, eval(str(caught.value).rpartition("leave it at ")[2]))
            with context:
                assert right(v1.load(tmp_path / "a"))


class Thing:
    pass


class ThingHandler(v1.CheckpointableHandler):
    async def save(self, directory: Any, checkpointable: Any) -> Any:
        async def write() -> None:
            (await directory.await_creation() / "thing").write_text("thing")

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        async def read() -> Any:
            assert (directory / "thing").read_text() == "thing"
            return Thing()

        return read()

    async def metadata(self, directory: Any) -> Any:
        return None

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Thing)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return isinstance(abstract_checkpointable, Thing)


def test_an_object_without_a_handler(tmp_path: Path):
    with told("orbax/ckpt_orbax/v1/_registry.py: or give the object the methods of ocp.Stateful"):
        v1.save_checkpointables(tmp_path / "a", {"thing": Thing()})
    context = v1.Context()
    with told("orbax/ckpt_orbax/v1/_registry.py: , and add to that") as said:
        context.checkpointables.registry.add(ThingHandler)
    exec(said.between("`", "`"), {"context": context, "ocp": v1})
    context.checkpointables.registry.add(ThingHandler)
    with context:
        v1.save_checkpointables(tmp_path / "a", {"thing": Thing()})
        assert isinstance(v1.load_checkpointables(tmp_path / "a")["thing"], Thing)
    with told("orbax/ckpt_orbax/v1/_files.py: ; ckpt_core.load gives the files themselves") as said:
        v1.load_checkpointables(tmp_path / "a", {"thing": Thing()})
    assert "register one with ocp.handlers.register_handler" in said.text
    assert ckpt.load(tmp_path / "a", item="thing").read("thing") == b"thing"


def test_parts(tmp_path: Path):
    with told(
        "orbax/ckpt_orbax/v1/partial.py: was not called for it in this process: call it first"
    ):
        v1.partial.finalize(tmp_path / "a")
    v1.partial.save(tmp_path / "a", STATE)
    v1.partial.finalize(tmp_path / "a")
    assert right(v1.load(tmp_path / "a"))


@pytest.mark.parametrize("call", ["cancel", "delete"])
def test_what_is_not_offered(tmp_path: Path, call: str):
    with v1.training.Checkpointer(tmp_path / "run") as run:
        if call == "cancel":
            response = run.save_async(0, STATE)
            with told(
                "orbax/ckpt_orbax/v1/training/_checkpointer.py: wait(), and delete(step) if the step"
            ):
                run.cancel()
            response.result()
            run.delete(0)
            assert not run.checkpoints
            return
        run.save_checkpointables(0, {"one": STATE, "two": STATE})
        with told(
            "orbax/ckpt_orbax/v1/training/_checkpointer.py: () without it, and save the rest"
        ) as said:
            run.delete(0, checkpointable_name="one")
        assert "load_checkpointables() without it" in said.text
        rest = run.load_checkpointables(0, {"two": None})
        v1.save_checkpointables(tmp_path / "rest", rest)
    assert right(v1.load_checkpointables(tmp_path / "rest")["two"])


# Flax's functions


def test_arguments_of_flax(tmp_path: Path):
    directory = str(tmp_path / "run")
    with told("orbax/ckpt_orbax/flax_checkpoints.py: : pass a large number to keep all"):
        flax_checkpoints.save_checkpoint(directory, STATE, 0, keep=0)
    with pytest.raises(TypeError, match="async_manager must be a ") as caught:
        flax_checkpoints.save_checkpoint(directory, STATE, 0, async_manager=True)  # pyright: ignore
    made = str(caught.value).partition("must be a ")[2].partition(", got")[0]
    made = eval(made, {"flax_checkpoints": flax_checkpoints})
    for step in range(3):
        flax_checkpoints.save_checkpoint(directory, STATE, step, keep=99, async_manager=made)
    made.wait_previous_save()
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint_*")) == [
        f"checkpoint_{step}" for step in range(3)
    ]


def test_a_step_of_flax_in_quotes(tmp_path: Path):
    directory = str(tmp_path / "run")
    with told(
        "orbax/ckpt_orbax/flax_checkpoints.py: step must be a whole number, got the text "
    ) as said:
        flax_checkpoints.save_checkpoint(directory, STATE, "5")  # pyright: ignore
    flax_checkpoints.save_checkpoint(directory, STATE, int(said.after("pass ")))
    assert flax_checkpoints.latest_checkpoint(directory) == f"{directory}/checkpoint_5"


def test_a_tree_without_arguments(tmp_path: Path):
    with manager(tmp_path) as one:
        with told(
            "orbax/ckpt_orbax/v0/_item_handlers.py: , or make the manager with item_handlers="
        ) as said:
            one.save(0, STATE)
        args = eval(said.between("pass args=", " or "), {"ocp": ocp, "tree": STATE})
        one.save(0, args=args)
    with manager(tmp_path) as again:
        with pytest.raises(TypeError, match="got the text '0'"):
            again.restore("0")
        assert right(again.restore(0))


@pytest.mark.parametrize("action", ["restore", "delete"])
def test_a_step_that_another_manager_saved(tmp_path: Path, action: str):
    mine = manager(tmp_path)
    with manager(tmp_path) as other:
        other.save(1, args=Standard({"w": W * 0}))
        other.wait_until_finished()
    key = "orbax/ckpt_orbax/v0/checkpoint_manager.py: . By this manager: reload(), and restore(latest_step()) goes on from there; delete("
    with told(key) as said:
        mine.save(1, args=Standard(STATE))
    mine.reload()
    if action == "restore":
        mine.restore(mine.latest_step())
        mine.save(2, args=Standard(STATE))
    else:
        eval(f"mine.{said.between('from there; ', ' removes')}", {"mine": mine})
        mine.save(1, args=Standard(STATE))
    mine.close()
    with manager(tmp_path) as again:
        assert again.all_steps() == ([1, 2] if action == "restore" else [1])
        assert right(again.restore(again.latest_step()))
