"""What ``save`` refuses, and what its messages say to do: done to the letter, and saved."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
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
        ckpt.load(STATE, path)  # pyright: ignore[reportArgumentType]
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
                call("12")  # pyright: ignore
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
