"""What ``save`` refuses, and arguments in the wrong place, misspelt or of another type; what the messages say is done to the letter."""

import dataclasses
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
from tests.contract.advice.said import FAST, save, told
from tests.support.own import Own

STATE = {"w": np.arange(4.0)}
OTHER = {"w": np.arange(4.0) + 7}


def holds(path: Any, value: Any = STATE["w"]) -> bool:
    return np.array_equal(ckpt.load(path)["w"], value)


def test_the_path_comes_first(tmp_path):
    path, state = tmp_path / "a", STATE
    with told("the path comes first, as in save(path, state)") as said:
        save(state, path)
    exec(said.between("as in ", " and load"), {"save": save, "path": path, "state": state})
    assert holds(path)
    with told("the path comes first, as in save(path, state)") as said:
        ckpt.load(STATE, path)
    names = {"load": ckpt.load, "path": path, "like": state}
    assert np.array_equal(
        eval("load" + said.text.rpartition("and load")[2], names)["w"], STATE["w"]
    )


def holds_item(path: Any, name: str, value: Any = STATE["w"]) -> bool:
    return np.array_equal(ckpt.load(path, item=name)["w"], value)


def test_settings_that_options_do_not_have(tmp_path):
    named: dict[str, Any] = {"compresion": "zstd"}
    with told(": write ") as said:
        ckpt.Options(**named)
    written = said.after("write ").replace("...", "'zstd'")
    assert eval(f"ckpt.Options({written})", {"ckpt": ckpt}).compression == "zstd"
    with pytest.raises(TypeError, match="lists all"):
        ckpt.Options(**{"zzz": 1})
    named = {"max_to_keep": 2}
    with told("and no setting: pass it there, not in Options"):
        ckpt.Options(**named)
    with ckpt.Checkpointer(tmp_path / "run", **named, options=FAST) as run:
        for step in range(4):
            run.save(step, STATE)
    assert ckpt.Checkpointer(tmp_path / "run").all_steps() == [2, 3]


class Opaque:
    def __init__(self):
        self.w = np.arange(4.0)


def test_an_object_that_is_not_known(tmp_path):
    with told("convert it to an array or a plain value, leave it out") as said:
        save(tmp_path / "a", {"one": Opaque()})
    assert "get_state() and set_state()" in said.text
    save(tmp_path / "a", {"one": np.asarray(Opaque().w), "w": STATE["w"]})
    save(tmp_path / "b", STATE)
    save(tmp_path / "c", one=Own(**STATE))
    again = Own(**OTHER)
    ckpt.restore(tmp_path / "c", one=again)
    assert holds(tmp_path / "a") and holds(tmp_path / "b") and np.array_equal(again.w, STATE["w"])


def test_functions(tmp_path):
    with told("functions are code, and no state: leave it out"):
        save(tmp_path / "a", {"f": np.tanh, "w": STATE["w"]})
    save(tmp_path / "a", STATE)
    assert holds(tmp_path / "a")
    holder = jax.tree_util.Partial(np.tanh, STATE["w"])
    save(tmp_path / "b", holder)
    back = ckpt.load(tmp_path / "b", jax.tree_util.Partial(np.tanh, np.zeros(4)))
    assert np.array_equal(back.args[0], STATE["w"])


def test_a_class_in_the_place_of_its_object(tmp_path):
    with told("a class is code, and no state: pass an object of it, ") as said:
        save(tmp_path / "a", one=Own)
    one = eval(said.between("an object of it, ", ", or").replace("...", ""), globals())
    one.w = STATE["w"]
    save(tmp_path / "a", one=one)
    again = Own(**OTHER)
    ckpt.restore(tmp_path / "a", one=again)
    assert np.array_equal(again.w, STATE["w"])


def test_an_item_as_a_leaf(tmp_path):
    with told("it is an item, and cannot be a leaf of a tree: pass it by a name"):
        save(tmp_path / "a", {"w": STATE["w"], "config": ckpt.Json({"a": 1})})
    save(tmp_path / "a", state=STATE, config=ckpt.Json({"a": 1}))
    assert ckpt.load(tmp_path / "a", item="config") == {"a": 1}
    assert holds_item(tmp_path / "a", "state")


def test_a_donated_array(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    for saved_before in (False, True):
        w = jnp.arange(4.0)
        if saved_before:
            save(tmp_path / "a", {"w": w})
        step(w)
        if not saved_before:
            w.delete()
            with told("was donated or deleted: save before the step that donates"):
                save(tmp_path / "a", {"w": w})
    assert holds(tmp_path / "a")


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_checkpoint_in_the_place_of_a_run(tmp_path, store, overwrite):
    path = f"memory://advice/{tmp_path.name}/run" if store else str(tmp_path / "run")
    with ckpt.Checkpointer(path, options=FAST) as run:
        for step in (2, 3):
            run.save(step, OTHER)
    key = "holds no checkpoint itself, but others ("
    covers = "holds something else, other checkpoints ("
    with told(covers if store else key) as said:
        ckpt.save(path, STATE, overwrite=overwrite)
    assert "(2, 3)" in said.text
    made, call = said.between("into it with ", ", or choose").split(".save")
    with eval(made, {"ckpt": ckpt, "path": path}) as run:
        eval(f"run.save{call.replace('...', 'STATE')}", {"run": run, "step": 4, "STATE": STATE})
    assert ckpt.Checkpointer(path, read_only=True).all_steps() == [2, 3, 4]


def test_a_step_in_quotes(tmp_path):
    with ckpt.Checkpointer(tmp_path / "run", options=FAST) as run:
        run.save(12, STATE)
        for call in (run.restore, run.load, run.inspect, lambda step: run.save(step, STATE)):
            with told(": pass ", of=TypeError) as said:
                call("12")
        assert run.restore(int(said.after("pass ")), OTHER).step == 12


class Counter(Own):
    def __init__(self, count: int = 0) -> None:
        super().__init__(count=count)


class Reader(Counter):
    per_process = True


class Around:
    """One that holds another, and sets it itself."""

    def __init__(self, inner: Counter) -> None:
        self.inner = inner

    def get_state(self) -> Any:
        return {"inner": self.inner.count}

    def set_state(self, state: Any) -> None:
        self.inner.count = state["inner"]


@pytest.mark.parametrize("make", [Counter, Reader, lambda n=0: linear(n)])
def test_one_live_object_at_two_places(tmp_path, make):
    """A restore cannot set it from both, and refuses it; so does the save."""
    one = make()
    places: list[Any] = [{"a": one, "b": one}]
    if make is Counter:
        places += [{"state": {"a": one, "b": [one]}}, {"a": {"x": one}, "b": one}]
    key = "are one and the same live "
    for n, items in enumerate(places):
        with ckpt.Checkpointer(tmp_path / f"run{n}") as run:
            for call in (
                lambda items=items: save(tmp_path / "a", items=items),
                lambda items=items: ckpt.save_async(tmp_path / "a", items=items),
                lambda items=items, run=run: run.save(0, items=items),
            ):
                with told(key, of=ckpt.UnsupportedLeaf) as said:
                    call()
                assert "a copy of it at the other" in said.text
            assert run.all_steps() == [] and not (tmp_path / "a").exists()
    save(tmp_path / "a", a=make(3), b=make(4))
    with told(key, of=ckpt.UnsupportedLeaf):
        ckpt.restore(tmp_path / "a", a=one, b=one)
    assert ckpt.restore(tmp_path / "a", a=one, b=make())["a"] is one


def test_one_live_object_that_may_stand_at_two_places(tmp_path):
    layer, other, inner = linear(1), linear(2), Counter(3)
    save(tmp_path / "a", {"a": layer, "b": layer})  # which shares its arrays
    save(tmp_path / "b", outer=Around(inner), inner=inner)
    assert ckpt.restore(tmp_path / "a", {"a": other, "b": other})["state"]["a"] is other
    assert (other.kernel[...] == layer.kernel[...]).all()
    inner.count = 0
    ckpt.restore(tmp_path / "b", outer=Around(inner), inner=inner)
    assert inner.count == 3


def linear(seed: int) -> Any:
    nnx = pytest.importorskip("flax.nnx")
    return nnx.Linear(2, 2, rngs=nnx.Rngs(seed))


def test_gradients_of_integers(tmp_path):
    both = {"w": jnp.ones(2), "n": jnp.ones(2, int)}
    gradients = jax.grad(lambda p: p["w"].sum(), allow_int=True)(both)
    for value in (gradients, {"n": np.zeros(2, jax.dtypes.float0)}):
        with told("leave it out, as in ", of=ckpt.UnsupportedLeaf) as said:
            save(tmp_path / "a", value)
        assert said.text.startswith("n: cannot save a")
    save(tmp_path / "a", eval(said.after("as in "), {"jax": jax, "gradients": gradients}))
    assert ckpt.load(tmp_path / "a")["n"] is None


@dataclasses.dataclass
class Half:
    """One whose second field nobody has set."""

    a: Any
    b: Any = dataclasses.field(init=False)


class Registered(Half):
    """The same for jax, which reads both fields."""


jax.tree_util.register_pytree_with_keys(
    Registered,
    lambda one: (
        ((jax.tree_util.GetAttrKey("a"), one.a), (jax.tree_util.GetAttrKey("b"), one.b)),
        None,
    ),
    lambda _, children: children,
)


@pytest.mark.parametrize("make", [Half, Registered])
def test_a_field_that_was_never_set(tmp_path, make):
    one = make(np.ones(2))
    with told("its field 'b' was never set: set it", of=ckpt.UnsupportedLeaf) as said:
        save(tmp_path / "a", {"layers": [one]})
    assert said.text.startswith("layers/0: ")
    one.b = 3
    save(tmp_path / "a", {"layers": [one]})


def test_an_array_that_is_not_reduced(tmp_path):
    sharding = jax.sharding
    if not hasattr(sharding, "reshard") or not hasattr(sharding.PartitionSpec(), "unreduced"):
        pytest.skip("this jax has no unreduced arrays")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(
            jnp.arange(8.0), sharding.NamedSharding(mesh, sharding.PartitionSpec("x"))
        )
        to = sharding.PartitionSpec(unreduced={"x"})
        array = jax.jit(lambda a: jnp.einsum("i,i->", a, a, out_sharding=to))(rows)
        with told("each device holds a part of its sum: save ", of=ckpt.UnsupportedLeaf) as said:
            save(tmp_path / "a", {"x": {"y": array}})
        assert said.text.startswith("x/y: ")
        save(tmp_path / "a", eval(said.after("sum: save "), {"jax": jax, "array": array}))
    assert ckpt.load(tmp_path / "a", as_numpy=True) == 140


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
                call(tmp_path / "a", items=items)
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
    with pytest.raises(TypeError, match="only= is a pattern, several, or a function"):
        ckpt.restore(tmp_path / "a", model=OTHER, only=3)


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
