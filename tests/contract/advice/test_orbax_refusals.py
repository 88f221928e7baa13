"""What ``ckpt_orbax`` does not offer, and what its messages say to write instead."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_orbax as ocp
from ckpt_orbax import v1
from ckpt_orbax.v0.metadata import ShardingMetadata
from tests.contract.advice.said import told

W = np.arange(4.0, dtype=np.float32)
STATE = {"w": W, "b": W + 1}
Standard = ocp.args.StandardSave


def right(value: Any) -> bool:
    return np.array_equal(value["w"], W)


def heard(engine_of: Any) -> tuple[list[str], Any]:
    """What a listener hears, and the settings that a message spells with ``...`` for the listener."""
    kinds: list[str] = []
    code = engine_of.replace("...", "listen")
    names = {"ckpt_core": ckpt, "listen": lambda event: kinds.append(event.kind)}
    return kinds, eval(code, names | vars(ocp))


def test_a_composite_is_made_anew() -> None:
    composite = ocp.args.Composite(state=1)
    with told("orbax/ckpt_orbax/v0/args.py: cannot be changed: make another one"):
        composite.state = 2
    assert ocp.args.Composite(state=2).state == 2


def test_an_item_that_nothing_was_said_of(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(state=Standard(STATE)))
    with ocp.CheckpointManager(tmp_path, item_names=("state",)) as manager:
        with told("orbax/ckpt_orbax/v0/_item_handlers.py: Give arguments, such as") as said:
            manager.restore(0, args=ocp.args.Composite(state=None))
        given = eval(said.after("such as "), {"ocp": ocp})
        assert right(manager.restore(0, args=ocp.args.Composite(state=given))["state"])


def test_a_handler_that_is_not_known(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    ckpt.save(tmp_path / "one", mine=ckpt.Files(_filled(folder)))
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    with told("orbax/ckpt_orbax/v0/_restoring.py: register it with") as said:
        checkpointer.restore(
            tmp_path / "one", args=ocp.args.Composite(mine=ocp.args.PyTreeRestore())
        )
    assert "ckpt_core.load gives the files themselves" in said.text

    @dataclasses.dataclass
    class MyArgs(ocp.args.CheckpointArgs):
        item: Any = None

    class MyHandler(ocp.CheckpointHandler):
        def save(self, directory: Any, args: Any) -> None:
            (directory / "note").write_text(args.item)

        def restore(self, directory: Any, args: Any = None) -> Any:
            return (directory / "note").read_text()

    register: Any = eval(said.between("register it with ", ";"), {"ocp": ocp})
    register(MyHandler, for_save=True, for_restore=True)(MyArgs)
    checkpointer = ocp.Checkpointer(
        ocp.CompositeCheckpointHandler()
    )  # what was asked of the other one stays
    found = checkpointer.restore(tmp_path / "one", args=ocp.args.Composite(mine=MyArgs()))
    assert found["mine"] == "a note"
    assert ckpt.load(tmp_path / "one", item="mine").read("note") == b"a note"


def _filled(folder: Path) -> Path:
    folder.mkdir()
    (folder / "note").write_text("a note")
    return folder


class Position:
    """A data pipeline with a state for each process."""

    per_process = True

    def __init__(self) -> None:
        self.at = 0

    def get_state(self) -> Any:
        return {"at": self.at}

    def set_state(self, state: Any) -> None:
        self.at = state["at"]


def test_the_state_of_each_process(tmp_path: Path) -> None:
    saved = Position()
    saved.at = 7
    ckpt.save(tmp_path / "one", data=saved)
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    with told("orbax/ckpt_orbax/v0/_restoring.py: give the object as item="):
        checkpointer.restore(
            tmp_path / "one", args=ocp.args.Composite(data=ocp.args.PyTreeRestore())
        )
    live = Position()
    given = ocp.args.Composite(data=ocp.args.PyTreeRestore(item=live))
    checkpointer.restore(tmp_path / "one", args=given)
    assert live.at == 7


def test_an_array_of_another_shape(tmp_path: Path) -> None:
    handler = ocp.PyTreeCheckpointHandler()
    checkpointer = ocp.Checkpointer(handler)
    checkpointer.save(tmp_path / "one", args=ocp.args.PyTreeSave({"w": W}))
    target = {"w": jax.ShapeDtypeStruct((6,), np.float32)}
    restore_args = {"w": ocp.ArrayRestoreArgs(strict=False, global_shape=(6,))}
    given = ocp.args.PyTreeRestore(item=target, restore_args=restore_args)
    with told("orbax/ckpt_orbax/v0/_tree_targets.py: restore the saved shape"):
        checkpointer.restore(tmp_path / "one", args=given)
    found = checkpointer.restore(tmp_path / "one", args=ocp.args.PyTreeRestore())
    assert right(found) and jnp.pad(found["w"], (0, 2)).shape == (6,)


def test_a_logger_of_the_first_api(tmp_path: Path) -> None:
    key = "orbax/ckpt_orbax/v0/checkpoint_manager.py: CheckpointManagerOptions(engine="
    with told(key) as said:
        ocp.CheckpointManager(tmp_path, logger=object())
    kinds, options = heard("CheckpointManagerOptions(engine=" + said.between("(engine=", ", or "))
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(0, args=Standard(STATE))
    assert "committed" in kinds


def test_items_that_are_described_twice(tmp_path: Path) -> None:
    handlers = ocp.PyTreeCheckpointHandler()
    with told("orbax/ckpt_orbax/v0/checkpoint_manager.py: are mutually exclusive") as said:
        ocp.CheckpointManager(tmp_path, item_names=("state",), item_handlers=handlers)
    assert "item_names and item_handlers" in said.text
    with ocp.CheckpointManager(tmp_path, item_names=("state",)) as manager:
        manager.save(0, args=ocp.args.Composite(state=Standard(STATE)))
        manager.wait_until_finished()
        assert right(manager.restore(0)["state"])


def test_a_function_after_the_save(tmp_path: Path) -> None:
    called: list[str] = []
    key = "orbax/ckpt_orbax/v0/checkpointers.py: , and call the function; or"
    with told(key) as said:
        ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(),
            post_finalization_callback=lambda: called.append("one"),
        )
    checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    checkpointer.save(tmp_path / "one", args=Standard(STATE))
    checkpointer.wait_until_finished()
    called.append("one")
    assert right(ckpt.load(tmp_path / "one"))
    code = said.after("; or ").replace(
        "async_options=", "async_options=AsyncOptions(post_finalization_callback=function)"
    )
    options = eval(code, {**vars(ocp), "function": lambda: called.append("two")})
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        manager.save(0, args=Standard(STATE))
    assert called == ["one", "two"]


def test_a_handler_that_needs_arguments() -> None:
    class Needs(ocp.StandardCheckpointHandler):
        def __init__(self, what: str) -> None:
            super().__init__()
            self.what = what

    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    key = "orbax/ckpt_orbax/v0/handlers.py: cannot be made without arguments"
    with told(key) as said:
        registry.add("state", Standard, Needs)
    assert said.after("arguments: ") == "give the handler itself"
    registry.add("state", Standard, Needs("it"))
    assert registry.get("state", Standard).what == "it"


def test_a_sharding_of_other_devices(tmp_path: Path) -> None:
    saved = {"sharding_type": "SingleDeviceSharding", "device_str": "TPU_0(process=0,(0,0,0,0))"}
    with told("orbax/ckpt_orbax/v0/metadata.py: : give another one"):
        ShardingMetadata(saved).to_jax_sharding()
    ckpt.save(tmp_path / "one", {"w": jnp.asarray(W)})
    place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    assert ckpt.load(tmp_path / "one", sharding=place)["w"].sharding == place


@pytest.mark.parametrize(
    ("field", "value", "key"),
    [
        (
            "serialization_status_callback",
            print,
            "orbax/ckpt_orbax/v1/_engine.py: context.engine = ckpt_core.Options(",
        ),
        ("logger", object(), "orbax/ckpt_orbax/v1/training/_checkpointer.py: context.engine ="),
    ],
)
def test_who_wants_to_be_told(tmp_path: Path, field: str, value: Any, key: str) -> None:
    context = v1.Context()
    with told(key) as said:
        if field == "logger":
            v1.training.Checkpointer(tmp_path / "run", logger=value)
        setattr(context.memory, field, value)
        with context:
            v1.save(tmp_path / "one", STATE)
    kinds, context = [], v1.Context()
    listen = kinds.append
    code = "context.engine = " + said.between("context.engine = ", "...)") + "listen)"
    exec(code, {"context": context, "ckpt_core": ckpt, "listen": listen})
    with context:
        v1.save(tmp_path / "one", STATE)
        assert right(v1.load(tmp_path / "one"))
    assert "committed" in [event.kind for event in kinds]


@pytest.mark.parametrize("make", [ocp.PyTreeCheckpointer, ocp.StandardCheckpointer])
def test_a_directory_of_steps_for_one_of_them(tmp_path: Path, make: Any) -> None:
    """The handler was named as what to call, which is what was called."""
    for by in ("manager", "ckpt"):
        directory = tmp_path / by
        if by == "ckpt":
            ckpt.save(directory / "7", STATE)
        else:
            with ocp.CheckpointManager(directory) as manager:
                manager.save(7, args=Standard(STATE))
        with told("_saved/opening.py: not one: load one of them by its path, such as") as said:
            make().restore(directory)
        assert right(make().restore(said.between("such as ", ", or use")))
        run = eval(said.after("or use "), {"ckpt_core": ckpt, "directory": directory})
        assert right(run.load(7) if by == "ckpt" else run.load(7, item="default"))
    (tmp_path / "nothing").mkdir()
    for handler in (ocp.PyTreeCheckpointHandler(), ocp.JsonCheckpointHandler()):
        with pytest.raises(FileNotFoundError, match="no checkpoint at"):
            ocp.Checkpointer(handler).restore(tmp_path / "nothing")


def test_a_message_of_protocol_buffers(tmp_path: Path) -> None:
    with told("orbax/ckpt_orbax/v1/_registry.py: save message.SerializeToString()") as said:
        v1.handlers.ProtoHandler()
    assert "or as ckpt_core.Files" in said.text
    data = b"\x08\x01"  # what SerializeToString gives
    ckpt.save(tmp_path / "one", proto=ckpt.Files(lambda at: (at / "message").write_bytes(data)))
    assert ckpt.load(tmp_path / "one", item="proto").read("message") == data
