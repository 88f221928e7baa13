"""What ``load`` and ``restore`` refuse, and what their messages say to do: done to the letter."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import ckpt_core as ckpt
from ckpt_core import _adapters
from tests.contract.advice.said import told
from tests.unit.load.test_only_patterns import Anything

W = np.arange(4.0, dtype=np.float32)
STATE = {"w": W}
FAST = ckpt.Options(durable=False)
AS_NUMPY: dict[str, Any] = {"w": np.zeros(4, np.float32)}


def save(path: Any, *state: Any, **named: Any) -> None:
    ckpt.save(path, *state, options=FAST, **named)


def right(value: Any) -> bool:
    return np.array_equal(value, W)


class Counted:
    """A live object that cannot be copied."""

    def __init__(self):
        self.w = np.zeros(4, np.float32)

    def get_state(self):
        return {"w": self.w}

    def set_state(self, state: Any):
        self.w = state["w"]


class Uncopied:
    """As an adapter's object: set in place, and no copy of it can be made."""


class UncopiedAdapter:
    package = __name__.partition(".")[0]

    def accepts(self, cls: type) -> bool:
        return cls is Uncopied

    def get_state(self, obj: Any) -> Any:
        return {"w": getattr(obj, "w", np.zeros(4, np.float32))}

    def set_state(self, obj: Any, state: Any) -> None:
        obj.w = state["w"]


# What is not there


def test_a_file_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from ckpt_core import convert
    from ckpt_core.cli import _app

    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "a b.npz", w=W)
    with told("_saved/opening.py: make a checkpoint of it with `ckpt import ") as said:
        ckpt.load(tmp_path / "a b.npz")
    *_, target = typed = shlex.split(said.between("`", "`"))
    monkeypatch.setattr("sys.argv", typed)
    assert _app.run() == 0
    assert right(ckpt.load(target)["w"])
    call = "ckpt.convert.import_weights"
    assert f"or {call}, and load that" in said.text
    convert.import_weights(tmp_path / "a b.npz", tmp_path / "other", options=FAST)
    assert right(ckpt.load(tmp_path / "other")["w"])


def test_a_record_that_is_missing(tmp_path: Path):
    save(tmp_path / "a", STATE)
    save(tmp_path / "b", STATE)
    record = tmp_path / "a" / "ckpt.json"
    kept = record.rename(tmp_path / "kept")
    with told("_saved/opening.py: Restore the file, or load another checkpoint"):
        ckpt.load(tmp_path / "a")
    assert right(ckpt.load(tmp_path / "b")["w"])
    kept.rename(record)
    assert right(ckpt.load(tmp_path / "a")["w"])


def test_several_files_of_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir("/")
    for name in ("a", "b c"):
        safetensors.numpy.save_file(STATE, tmp_path / f"{name}.safetensors")
    with told("_saved/foreign.py: together: load one of them by its path, such as") as said:
        ckpt.load(tmp_path)
    assert right(ckpt.load(said.text.rpartition("such as ")[2])["w"])


@pytest.mark.parametrize("action", ["anew", "by its own path"])
def test_one_file_of_several(tmp_path: Path, action: str):
    file = tmp_path / "model-00001-of-00002.safetensors"
    safetensors.numpy.save_file(STATE, file)
    with told("_saved/foreign.py: Do that anew, or load this file by its own path"):
        ckpt.load(tmp_path)
    if action == "anew":
        other = {"b": W}
        save(tmp_path / "whole", {"w": W, "b": W})
        ckpt.convert.export_safetensors(tmp_path / "whole", tmp_path / "fetched", max_shard_bytes=1)
        assert right(ckpt.load(tmp_path / "fetched")["b"]) and other
    else:
        assert right(ckpt.load(file)["w"])


# Items and states


def test_items_and_one_state(tmp_path: Path):
    save(tmp_path / "items", params=STATE, opt=STATE)
    save(tmp_path / "one", STATE)
    like: Any = AS_NUMPY
    with told("_load/loading.py: like must be a dict of items, or name one with item="):
        ckpt.load(tmp_path / "items", [like])
    assert right(ckpt.load(tmp_path / "items", {"opt": like})["opt"]["w"])
    assert right(ckpt.load(tmp_path / "items", like, item="opt")["w"])
    with told("_load/matching.py: : pass each target by its name (") as said:
        ckpt.restore(tmp_path / "items", like)
    by_name = eval(
        f"dict({said.between('by its name (', ')')})".replace("...", "like"), {"like": like}
    )
    restored = ckpt.restore(tmp_path / "items", **by_name)
    assert all(right(restored[name]["w"]) for name in ("params", "opt"))
    with told("_load/matching.py: : it was saved as one state, pass one target without a name"):
        ckpt.restore(tmp_path / "one", params=like)
    assert right(ckpt.restore(tmp_path / "one", like)["state"]["w"])
    with told(
        "_load/request.py: not both: if the checkpoint was saved as one state, pass only that"
    ):
        ckpt.restore(tmp_path / "one", like, params=like)
    with told("_load/__init__.py: restore needs at least one target, such as model=model") as said:
        ckpt.restore(tmp_path / "one")
    save(tmp_path / "model", model=STATE)
    target = eval(f"dict({said.between('such as ', ';')})", {"model": like})
    assert right(ckpt.restore(tmp_path / "model", **target)["model"]["w"])
    assert "use load" in said.text and right(ckpt.load(tmp_path / "one")["w"])


def test_an_item_that_is_not_there(tmp_path: Path):
    """A typing error; and a run that saves one item more than it did before."""
    like: Any = AS_NUMPY
    with ckpt.Checkpointer(tmp_path / "run", options=FAST) as run:
        run.save(0, model=STATE, opt=STATE)
        with told("_load/matching.py: : did you mean ") as said:
            run.restore_latest(modle=like)
        restored = run.restore_latest(**{said.between("did you mean '", "'?"): like})
        assert restored and right(restored["model"]["w"])
        with told("_load/matching.py: : restore what is there by its name") as said:
            run.restore_latest(model=like, opt=like, ema=like)
        named = said.between("by its name (", "), or use").replace("...", "like")
        restored = eval(f"run.restore_latest({named})")
        assert restored and right(restored["opt"]["w"])
    with ckpt.Checkpointer(tmp_path / "run", options=FAST) as run:
        restored = run.restore_latest(model=like, opt=like)
        assert restored
        run.save(1, model=restored["model"], opt=restored["opt"], ema=STATE)
    with ckpt.Checkpointer(tmp_path / "other", options=FAST) as other:
        assert other.restore_latest(model=like, opt=like, ema=like) is None


def test_arguments_meant_as_arguments(tmp_path: Path):
    """In an empty directory, where a restore has nothing to say no to."""
    with ckpt.Checkpointer(tmp_path / "run", options=FAST) as run:
        with told("_options.py: looks like the argument") as said:
            run.restore_latest(AS_NUMPY, mising="keep")
        written = said.between("write ", "=...")
        assert run.restore_latest(AS_NUMPY, **{written: "keep"}) is None
        run.save(0, STATE)
    with ckpt.Checkpointer(tmp_path / "run", options=FAST) as run:
        more = {**AS_NUMPY, "more": np.ones(2)}
        restored = run.restore_latest(more, **{written: "keep"})
        assert restored is not None and right(restored["state"]["w"])
        with told("_options.py: looks like the argument") as said:
            run.restore(0, AS_NUMPY, mising=AS_NUMPY)
    save(tmp_path / "item", items={"state": STATE, "mising": STATE})
    items = eval(
        said.text.rpartition("passed as items=")[2].replace("...", "like"), {"like": AS_NUMPY}
    )
    assert right(ckpt.restore(tmp_path / "item", items=items)["mising"]["w"])


def test_values_by_unpacking(tmp_path: Path):
    save(tmp_path / "a", params=STATE, opt={"w": W + 1})
    restored = ckpt.restore(tmp_path / "a", params=AS_NUMPY, opt=AS_NUMPY)
    with told("_results/records.py: and not their values: write") as said:
        params, opt = restored
    names: dict[str, Any] = {"restored": restored}
    exec(said.between("write ", " for each"), names)
    assert right(names["params"]["w"])
    params, opt = eval(said.text.rpartition("or take ")[2], names)
    assert right(params["w"]) and right(opt["w"] - 1)


# Differences


def mismatch(path: Path, like: Any, **more: Any) -> list[str]:
    """The arguments that the message names, as it spells them."""
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.load(path, like, **more)
    said = str(caught.value).partition("Where this is intended: ")[2]
    return [part.split(" ")[0] for part in said.replace(".", ";").split("; ")]


def test_what_a_difference_may_be(tmp_path: Path):
    """Keys of the arguments: ``_load/loading.py: missing="keep" keeps what the target holds`` and others."""
    covers = [
        '_load/loading.py: missing="keep" keeps what the target holds',
        '_load/loading.py: unexpected="ignore" leaves saved leaves out',
        "_load/loading.py: cast=True converts dtypes",
        "_load/loading.py: rename= maps saved paths to wanted ones",
    ]
    assert covers
    save(tmp_path / "a", {"w": W, "b": W})
    path, like = tmp_path / "a", {"w": jnp.zeros(4), "b": jnp.zeros(4)}
    arguments = mismatch(path, {**like, "c": jnp.ones(1)})
    loaded = ckpt.load(path, {**like, "c": jnp.ones(1)}, **eval(f"dict({arguments[0]})"))
    assert right(loaded["w"]) and loaded["c"].tolist() == [1]
    arguments = mismatch(path, {"w": like["w"]})
    loaded = ckpt.load(path, {"w": like["w"]}, **eval(f"dict({arguments[0]})"))
    assert right(loaded["w"]) and len(loaded) == 1
    half = {"w": like["w"].astype(jnp.float16), "b": like["b"]}
    arguments = mismatch(path, half)
    loaded = ckpt.load(path, half, **eval(f"dict({arguments[0]})"))
    assert loaded["w"].dtype == jnp.float16 and right(loaded["w"])
    other = {"w": like["w"], "bias": like["b"]}
    arguments = mismatch(path, other)
    assert [part.split("=")[0] for part in arguments if part] == ["missing", "unexpected", "rename"]
    assert right(ckpt.load(path, other, rename={"b": "bias"})["bias"])
    both = eval(f"dict({arguments[0]}, {arguments[1]})")
    assert right(ckpt.load(path, other, **both)["w"])


def test_a_target_that_is_traced(tmp_path: Path):
    save(tmp_path / "a", STATE)
    with told("_load/targets.py: : it is being traced: load outside of jit and grad"):
        jax.jit(lambda w: ckpt.load(tmp_path / "a", {"w": w}))(jnp.zeros(4))
    assert right(jax.jit(lambda w: w + 0)(ckpt.load(tmp_path / "a", {"w": jnp.zeros(4)})["w"]))


def test_a_shape_that_differs(tmp_path: Path):
    save(tmp_path / "a", {"w": W, "b": W})
    path, like = tmp_path / "a", {"w": jnp.zeros(4), "b": jnp.zeros(6)}
    with told(
        "_load/loading.py: No argument changes a shape: change the target, or load what fits with only="
    ):
        ckpt.load(path, like)
    assert right(ckpt.load(path, {**like, "b": jnp.zeros(4)})["b"])
    fitting = ckpt.load(path, like, only="w")
    assert right(fitting["w"])
    assert right(ckpt.load(path, only="b")["b"])


def test_functions_that_differ(tmp_path: Path):
    covers = '_load/loading.py: unexpected="ignore" keeps the functions of the target'
    assert covers
    save(tmp_path / "a", jax.tree_util.Partial(np.tanh, W))
    like = jax.tree_util.Partial(np.sin, jnp.zeros(4))
    arguments = mismatch(tmp_path / "a", like)
    back = ckpt.load(tmp_path / "a", like, **eval(f"dict({arguments[0]})"))
    assert back.func is np.sin and right(back.args[0])
    with told("_load/functions.py: Pass a target that has them, such as load(path, model)") as said:
        ckpt.load(tmp_path / "a")
    load = said.between("such as ", ", where")
    names = {
        "load": ckpt.load,
        "path": tmp_path / "a",
        "model": jax.tree_util.Partial(np.tanh, W * 0),
    }
    assert right(eval(load, names).args[0])
    left_out = eval(f"dict({said.between('leave them out with ', ', which')})")
    (found,) = jax.tree.leaves(ckpt.load(tmp_path / "a", **left_out))
    assert right(found)


def test_nothing_to_keep(tmp_path: Path):
    save(tmp_path / "a", STATE)
    abstract = {
        "w": jax.ShapeDtypeStruct((4,), jnp.float32),
        "b": jax.ShapeDtypeStruct((1,), jnp.float32),
    }
    key = "_load/loading.py: pass a target with values instead of an abstract one, or select with only="
    with told(key.replace(" only=", "")):
        ckpt.load(tmp_path / "a", abstract, missing="keep")
    values = {"w": jnp.zeros(4), "b": jnp.ones(1)}
    back = ckpt.load(tmp_path / "a", values, missing="keep")
    assert right(back["w"]) and back["b"].tolist() == [1]
    assert right(ckpt.load(tmp_path / "a", abstract, only="w")["w"])


def test_rename_that_matches_nothing(tmp_path: Path):
    save(tmp_path / "a", {"layer": STATE})
    with told("_errors.py: : no saved path begins with this; rename= maps it to") as said:
        ckpt.load(tmp_path / "a", {"layer": AS_NUMPY}, rename={"layr": "dense"})
    nearest = said.between("nearest name: ", ")")
    back = ckpt.load(tmp_path / "a", {"dense": AS_NUMPY}, rename={nearest: "dense"})
    assert right(back["dense"]["w"])


def test_filters_and_patterns(tmp_path: Path):
    save(tmp_path / "a", STATE)
    with told(
        "_load/matching.py: has no adapter that knows this class as a filter: use a pattern such as"
    ) as said:
        ckpt.load(tmp_path / "a", AS_NUMPY, only=dict)
    save(tmp_path / "b", {"params": STATE})
    only = eval(f"dict({said.text.rpartition('such as ')[2]})")
    assert right(ckpt.load(tmp_path / "b", {"params": AS_NUMPY}, **only)["params"]["w"])


# Targets


def test_rules_need_a_target(tmp_path: Path):
    safetensors.numpy.save_file(STATE, tmp_path / "a.safetensors")
    rules = [ckpt.Rule("w", "weight")]
    with told(
        "_load/request.py: rules= needs a target: pass like, whose paths and shapes they are"
    ):
        ckpt.load(tmp_path / "a.safetensors", rules=rules)
    assert right(ckpt.load(tmp_path / "a.safetensors", {"weight": W * 0}, rules=rules)["weight"])


def test_a_target_that_is_none(tmp_path: Path):
    save(tmp_path / "a", STATE)
    with told(
        "_load/targets.py: give an array, a jax.ShapeDtypeStruct or a plain value of what was"
    ):
        ckpt.load(tmp_path / "a", {"w": object()})
    for target in (jnp.zeros(4), jax.ShapeDtypeStruct((4,), jnp.float32)):
        assert right(ckpt.load(tmp_path / "a", {"w": target})["w"])
    assert right(ckpt.load(tmp_path / "a")["w"])


def test_shardings_that_have_no_place_for_a_leaf(tmp_path: Path, mesh: Any):
    save(tmp_path / "a", {"w": jnp.arange(4.0), "b": jnp.arange(4.0)})
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with told(
        "_load/targets.py: a tree of shardings with the structure of the checkpoint, or a"
    ) as said:
        ckpt.load(tmp_path / "a", sharding={"w": spec})
    assert "pass a Sharding, a Mesh, a tree" in said.text
    for sharding in (spec, mesh, {"w": spec, "b": spec}, lambda path, leaf: spec):
        back = ckpt.load(tmp_path / "a", sharding=sharding)
        assert right(back["b"]) and len(back["b"].sharding.device_set) == 8


def test_sixty_four_bits(tmp_path: Path):
    with jax.enable_x64(True):
        save(tmp_path / "a", {"w": jnp.arange(4.0, dtype=jnp.float64)})
    with told(
        "_load/targets.py: load with as_numpy=True, or give a target of 32 bits and cast=True"
    ) as said:
        ckpt.load(tmp_path / "a")
    with jax.enable_x64(True):
        assert ckpt.load(tmp_path / "a")["w"].dtype == "float64"
    as_numpy = eval(f"dict({said.between('load with ', ', or')})")
    assert ckpt.load(tmp_path / "a", **as_numpy)["w"].dtype == "float64"
    cast = eval(f"dict({said.text.rpartition('bits and ')[2]})")
    assert right(ckpt.load(tmp_path / "a", {"w": jnp.zeros(4)}, **cast)["w"])


def test_more_than_the_device_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: Any):
    save(tmp_path / "a", {"w": jnp.arange(4.0)})
    monkeypatch.setattr("ckpt_core._devices.placing.free_bytes", lambda: 1)
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with told(
        "_load/targets.py: spread them by a target with shardings or load with sharding="
    ) as said:
        ckpt.load(tmp_path / "a")
    as_numpy = eval(f"dict({said.text.rpartition('host with ')[2]})")
    assert right(ckpt.load(tmp_path / "a", **as_numpy)["w"])
    assert right(ckpt.load(tmp_path / "a", sharding=spread)["w"])
    target = {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=spread)}
    assert right(ckpt.load(tmp_path / "a", target)["w"])


def test_a_mesh_that_is_not_set(tmp_path: Path, mesh: Any):
    save(tmp_path / "a", {"w": jnp.arange(4.0)})
    abstract = jax.sharding.NamedSharding(mesh.abstract_mesh, jax.sharding.PartitionSpec())
    target = {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=abstract)}
    with told("_devices/shardings.py: : load inside `with jax.set_mesh(mesh):`") as said:
        ckpt.load(tmp_path / "a", target)
    names: dict[str, Any] = {
        "jax": jax,
        "mesh": mesh,
        "ckpt": ckpt,
        "path": tmp_path / "a",
        "target": target,
    }
    exec(f"{said.between('`', '`')} back = ckpt.load(path, target)", names)
    assert right(names["back"]["w"])


# Live objects


@pytest.fixture(name="uncopied")
def register_uncopied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_core._adapters._registered", {})
    monkeypatch.setattr("ckpt_core._adapters._for_class", _adapters._for_class.__wrapped__)
    _adapters._registered["mine"] = UncopiedAdapter()


def test_objects_that_cannot_be_copied(tmp_path: Path, uncopied: None):
    obj = Uncopied()
    obj.w = W  # pyright: ignore[reportAttributeAccessIssue]
    save(tmp_path / "a", obj)
    save(tmp_path / "b", model=obj)
    for path, like in ((tmp_path / "a", Uncopied()), (tmp_path / "b", {"model": Uncopied()})):
        with told(
            "_load/live_objects.py: cannot be copied. To set it in place, use restore(path,"
        ) as said:
            ckpt.load(path, like)
        again: Any = Uncopied()
        call = said.between("use ", ";").replace("...", "again")
        eval(call, {"restore": ckpt.restore, "path": path, "again": again})
        assert right(again.w)
        loaded = ckpt.load(path)
        assert right((loaded.get("model") or loaded)["w"])


def test_one_object_under_two_names(tmp_path: Path):
    one, two = Counted(), Counted()
    one.w = W
    save(tmp_path / "a", one=one, two=two)
    again = Counted()
    with told(
        "_load/live_objects.py: Restore it under one of the names; what is saved under another"
    ) as said:
        ckpt.restore(tmp_path / "a", one=again, two=again)
    ckpt.restore(tmp_path / "a", one=again)
    call = said.text.rpartition("is loaded with ")[2].replace("...", "'two'")
    other = eval(call, {"load": ckpt.load, "path": tmp_path / "a"})
    assert right(again.w) and other["w"].tolist() == [0] * 4


class Refuses(Counted):
    """Takes its own state, and no other: fails when what comes before it is set already."""

    def set_state(self, state: Any):
        raise ValueError("not today")


class OnlyOnce(Counted):
    """Can be set, and not be set back."""

    times = 0

    def set_state(self, state: Any):
        self.times += 1
        if self.times == 2:
            raise ValueError("not twice")
        super().set_state(state)


@pytest.mark.parametrize("action", ["another step", "create", "atomic"])
def test_a_restore_that_failed_in_the_middle(tmp_path: Path, action: str):
    nnx = pytest.importorskip("flax.nnx")

    def make(seed: int) -> Any:
        rngs = nnx.Rngs(seed)
        return nnx.Sequential(*(nnx.Linear(32, 32, rngs=rngs) for _ in range(6)))

    def values(model: Any) -> list[Any]:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]

    save(tmp_path / "a", other=Counted(), model=make(0))
    save(tmp_path / "b", model=make(0))
    again, before = make(1), values(make(1))
    options = ckpt.Options(max_host_bytes=4096, durable=False)
    with pytest.raises(ValueError, match="not today") as caught:
        ckpt.restore(tmp_path / "a", other=Refuses(), model=again, options=options)
    note = "\n".join(caught.value.__notes__)
    key = "_load/in_place.py: Restore another step into it, or create it again. Options(atomic_restore="
    assert key.partition(".py: ")[2] in note
    if action == "atomic":
        how = "atomic_restore=" + note.partition("Options(atomic_restore=")[2].partition(")")[0]
        again = make(1)
        options = eval(f"ckpt.Options({how}, max_host_bytes=4096)", {"ckpt": ckpt})
        with pytest.raises(ValueError, match="not today"):
            ckpt.restore(tmp_path / "a", other=Refuses(), model=again, options=options)
        assert all(map(np.array_equal, values(again), before)), "changes nothing"
    again = make(1) if action == "create" else again
    ckpt.restore(tmp_path / "b", model=again)
    assert all(map(np.array_equal, values(again), values(make(0))))


@pytest.mark.parametrize("action", ["create", "again"])
def test_an_object_that_cannot_be_set_back(tmp_path: Path, action: str):
    one = OnlyOnce()
    one.w = W
    save(tmp_path / "a", one=one, other=Counted())
    again = OnlyOnce()
    with pytest.raises(ValueError, match="not today") as caught:
        ckpt.restore(tmp_path / "a", one=again, other=Refuses())
    key = "_load/in_place.py: Create it again, or restore into it again, before it is used"
    assert key.partition(".py: ")[2] in "".join(caught.value.__notes__)
    again = OnlyOnce() if action == "create" else again
    ckpt.restore(tmp_path / "a", one=again)
    assert right(again.w)


# Settings that this machine lacks


def test_a_kind_of_memory_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every device has one of them here, so its list is read from another place."""
    from ckpt_core._devices.transfer import _moved

    state = {"w": jnp.arange(4.0)}
    with told("_devices/transfer.py: ; use 'host'") as said:
        _moved(state, "no_such_memory")
    snapshot = eval(said.text.rpartition("use ")[2])
    options = ckpt.Options(durable=False, snapshot=snapshot)
    ckpt.save_async(tmp_path / "a", state, options=options).result()
    assert right(ckpt.load(tmp_path / "a")["w"])


def test_only_of_an_object_that_lacks_the_rest(tmp_path: Path) -> None:
    save(tmp_path / "c", items={"e": Anything({"w": W, "n": 3})})
    target = Anything({"w": np.zeros(4, np.float32)})
    with told("_load/matching.py: only= keeps what the object has there, and it has nothing"):
        ckpt.restore(tmp_path / "c", items={"e": target}, only="e/w")
    ckpt.restore(tmp_path / "c", items={"e": target})
    assert right(target.state["w"])
    target = Anything({"w": np.zeros(4, np.float32), "n": 0})
    ckpt.restore(tmp_path / "c", items={"e": target}, only="e/w")
    assert right(target.state["w"])
