"""Restored values that nobody took: whatever is saved in their place is refused, and nothing else."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ckpt_core as ckpt
from tests.support.own import Own

ADAM = optax.adam(1e-3)


class Description(Own):
    """One that each save writes anew."""

    written_anew = True


def open_at(directory: Path, **arguments: Any) -> ckpt.Checkpointer:
    options = ckpt.Options(durable=False)
    return ckpt.Checkpointer(directory, asynchronous=False, options=options, **arguments)


def params() -> dict[str, Any]:
    return {"w": jnp.arange(4.0)}


def saved(directory: Path, **items: Any) -> Path:
    with open_at(directory) as checkpointer:
        checkpointer.save(0, items=items)
    return directory


# kind -> (a fresh one, what a loop makes of it before it saves)
VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "jax": (params, lambda tree: jax.tree.map(lambda x: x * 2, tree)),
    "numpy": (lambda: {"w": np.zeros(3)}, lambda tree: {"w": tree["w"] + 1}),
    "changed in place": (lambda: {"w": np.zeros(3)}, lambda tree: tree),
    "optax": (lambda: ADAM.init(params()), lambda state: ADAM.update(params(), state, params())[1]),
    "number": (lambda: 7, lambda number: number + 1),
    "key": (lambda: jax.random.key(0), lambda key: jax.random.split(key)[0]),
    "text": (lambda: {"name": "a"}, lambda tree: {"name": tree["name"] + "b"}),
    "bare array": (lambda: jnp.ones(3), lambda array: array + 1),
    "abstract": (
        lambda: jax.eval_shape(params),
        lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree),
    ),
    "holds a live object": (
        lambda: {"live": Own(count=0), "n": 1},
        lambda tree: {**tree, "n": tree["n"] + 1},
    ),
    "of another kind": (lambda: {"w": np.zeros(3)}, lambda tree: Own(count=5)),
}


@pytest.fixture(params=VALUES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def first_of(kind: str) -> Any:
    """What an earlier run saved."""
    fresh = VALUES[kind][0]()
    return params() if kind == "abstract" else fresh


@pytest.mark.parametrize("how", ["restore", "restore_latest", "by a policy that declines"])
def test_whatever_is_saved_under_the_name_is_refused(tmp_path, kind, how):
    """A loop updates its state before it saves, so it never saves the very objects it passed."""
    make, update = VALUES[kind]
    saved(tmp_path, thing=first_of(kind))
    declines = "policy" in how
    with open_at(tmp_path, save_interval_steps=1000 if declines else 1) as checkpointer:
        state = make()
        if how == "restore":
            restored = checkpointer.restore(0, thing=state)
        else:
            restored = checkpointer.restore_latest(thing=state)
            assert restored is not None
        state = update(state)
        for step in (1, 2):
            with pytest.raises(ckpt.RestoredValueIgnored, match="item 'thing'") as caught:
                checkpointer.save(step, thing=state)
            assert caught.value.item == "thing"
            assert "restored['thing']" in str(caught.value)
        assert checkpointer.all_steps() == [0]
        assert restored["thing"] is not None
        assert checkpointer.save(3, thing=state, force=True)  # it was taken: the rest is their wish


TAKING: dict[str, Callable[[ckpt.Restored], Any]] = {
    "by name": lambda restored: restored["thing"],
    "as attribute": lambda restored: restored.thing,
    "values": lambda restored: list(restored.values()),
    "items": lambda restored: list(restored.items()),
    "dict": dict,
    "get": lambda restored: restored.get("thing"),
    "unpacked": lambda restored: {**restored},
}


@pytest.mark.parametrize("way", TAKING)
def test_every_way_of_taking_it_counts(tmp_path, way):
    with open_at(saved(tmp_path, thing=params())) as checkpointer:
        restored = checkpointer.restore_latest(thing=params())
        assert restored is not None
        TAKING[way](restored)
        assert checkpointer.save(1, thing=params())


LOOKING: dict[str, Callable[[ckpt.Restored], Any]] = {
    "truth": bool,
    "length": len,
    "a name in it": lambda restored: "thing" in restored,
    "names": list,
    "text": repr,
    "another one": lambda restored: restored.get("other"),
    "attributes": lambda restored: (restored.step, restored.path, restored.report),
}


@pytest.mark.parametrize("way", LOOKING)
def test_looking_at_the_result_takes_nothing(tmp_path, way):
    with open_at(saved(tmp_path, thing=params())) as checkpointer:
        restored = checkpointer.restore_latest(thing=params())
        assert restored is not None
        LOOKING[way](restored)
        with pytest.raises(ckpt.RestoredValueIgnored):
            checkpointer.save(1, thing=params())


def test_only_the_one_that_was_not_taken_is_named(tmp_path):
    with open_at(saved(tmp_path, one=params(), two=params())) as checkpointer:
        restored = checkpointer.restore_latest(one=params(), two=params())
        assert restored.one is not None
        with pytest.raises(ckpt.RestoredValueIgnored, match="'two'") as caught:
            checkpointer.save(1, one=params(), two=params())
        assert caught.value.item == "two"
        assert checkpointer.save(1, one=params())


def test_objects_that_are_set_in_place_need_no_taking(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    live = {
        "model": model,
        "optimizer": nnx.Optimizer(model, ADAM, wrt=nnx.Param),
        "counter": Own(count=3),
        "several": [Own(count=1), Own(count=2)],
        "nothing": {},
        "none": None,
    }
    with open_at(saved(tmp_path, **live)) as checkpointer:
        checkpointer.restore_latest(items=live)
        assert checkpointer.save(1, items=live)


@pytest.mark.parametrize("how", ["restore", "restore_latest"])
def test_an_item_that_was_left_out_is_not_begun_anew(tmp_path, how):
    saved(tmp_path, model=Own(count=1), optimizer=Own(count=2))
    with open_at(tmp_path) as checkpointer:
        if how == "restore":
            checkpointer.restore(0, model=Own(count=0))
        else:
            checkpointer.restore_latest(model=Own(count=0))
        with pytest.raises(ckpt.RestoredValueIgnored, match="'optimizer'") as caught:
            checkpointer.save(1, model=Own(count=0), optimizer=Own(count=0))
        assert caught.value.item == "optimizer"
        assert "optimizer=" in str(caught.value)
        assert 'unexpected="ignore"' in str(caught.value)
        assert checkpointer.save(
            1, model=Own(count=0), more=Own(count=0)
        )  # what is new may begin anew


def test_the_two_ways_out(tmp_path):
    saved(tmp_path, model=Own(count=1), optimizer=Own(count=2))
    ways: list[dict[str, Any]] = [{"unexpected": "ignore"}, {"items": {"optimizer": Own(count=0)}}]
    for arguments in ways:
        with open_at(tmp_path) as checkpointer:
            checkpointer.restore_latest(model=Own(count=0), **arguments)
            step = (checkpointer.latest_step() or 0) + 1
            assert checkpointer.save(step, model=Own(count=0), optimizer=Own(count=0))


def test_what_is_written_anew_needs_no_restoring(tmp_path):
    saved(tmp_path, model=Own(count=1), description=Description(count=2))
    with open_at(tmp_path) as checkpointer:
        checkpointer.restore_latest(model=Own(count=0))
        assert checkpointer.save(1, model=Own(count=0), description=Description(count=3))
        with pytest.raises(ckpt.RestoredValueIgnored):
            checkpointer.save(2, model=Own(count=0), description=Own(count=0))


CONSTANTS: dict[str, Callable[[], Any]] = {
    "Json": lambda: ckpt.Json({"layers": 3}),
    "Files of a path": lambda: ckpt.Files(__file__),
    "Files of a function": lambda: ckpt.Files(lambda folder: (folder / "words").write_text("a b")),
}


@pytest.mark.parametrize("name", ["config", "metrics"])
@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_are_written_anew(tmp_path, kind, name):
    """Each program makes them at its start, and saves them with each step; a restore may leave them out, or nobody read them."""
    make = CONSTANTS[kind]
    saved(tmp_path, state=params(), **{name: make()})
    for step, asked in enumerate([{}, {"items": {name: make()}}, {}], 1):
        with open_at(tmp_path) as checkpointer:
            restored = checkpointer.restore_latest(state=params(), **asked)
            assert restored is not None and restored.step == step - 1
            with pytest.raises(ckpt.RestoredValueIgnored, match="'state'"):
                checkpointer.save(step, items={"state": params(), name: make()})
            assert checkpointer.save(step, items={"state": restored["state"], name: make()})


def test_an_item_that_is_restored_in_part_is_restored(tmp_path):
    saved(tmp_path, tree={"a": jnp.ones(2), "b": jnp.ones(3)})
    parts: list[dict[str, Any]] = [{"only": "tree/a"}, {"missing": "keep", "unexpected": "ignore"}]
    for arguments in parts:
        target = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
        with open_at(tmp_path) as checkpointer:
            restored = checkpointer.restore(0, tree=target, **arguments)
            with pytest.raises(ckpt.RestoredValueIgnored, match="never read"):
                checkpointer.save(1, tree=target)
            assert restored["tree"]["a"][0] == 1
            assert checkpointer.save(1, tree=target, overwrite=True)


def test_a_fresh_start_is_not_watched(tmp_path):
    with open_at(tmp_path) as checkpointer:
        assert checkpointer.restore_latest(state=params()) is None
        assert checkpointer.save(0, params())


def test_a_later_restore_is_the_one_that_counts(tmp_path):
    saved(tmp_path, one=params(), two=params())
    with open_at(tmp_path) as checkpointer:
        checkpointer.restore_latest(one=params(), two=params())
        again = checkpointer.restore(0, one=params(), unexpected="ignore")
        assert again["one"] is not None
        assert checkpointer.save(1, one=params(), two=params())
        checkpointer.restore(1, one=params(), two=params())
        with pytest.raises(ckpt.RestoredValueIgnored, match="step 1"):
            checkpointer.save(2, one=params(), two=params())


def test_load_neither_takes_a_value_nor_has_to_be_taken(tmp_path):
    saved(tmp_path, state=params())
    with open_at(tmp_path) as checkpointer:
        checkpointer.load(0)
        assert checkpointer.save(1, params())
        checkpointer.restore_latest(state=params())
        checkpointer.load(0)
        with pytest.raises(ckpt.RestoredValueIgnored):
            checkpointer.save(2, params())


def test_a_failed_restore_is_not_watched(tmp_path):
    saved(tmp_path, state=params())
    with open_at(tmp_path) as checkpointer:
        with pytest.raises(ckpt.StructureMismatch):
            checkpointer.restore_latest(state={"v": jnp.ones(2)})
        assert checkpointer.save(1, params())


def test_the_positional_state_is_an_item_as_well(tmp_path):
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(0, params())
    with open_at(tmp_path) as checkpointer:
        restored = checkpointer.restore_latest(state=params())
        with pytest.raises(ckpt.RestoredValueIgnored, match="'state'"):
            checkpointer.save(1, params())
        assert checkpointer.save(1, restored["state"])


def test_parts_of_a_step_that_are_restored_one_after_the_other(tmp_path):
    files = saved(tmp_path / "other", files=ckpt.Files(__file__)) / "0"
    saved(tmp_path / "run", one=params(), two=params(), three=params(), files=ckpt.Files(__file__))
    with open_at(tmp_path / "run") as checkpointer:
        one = checkpointer.restore_latest(one=params())
        two = checkpointer.restore(0, two=params())
        assert one is not None and one["one"] is not None
        items = {"one": params(), "three": checkpointer.load(0, item="three")}
        items["files"] = ckpt.load(files, item="files")
        with pytest.raises(ckpt.RestoredValueIgnored, match="'two'"):
            checkpointer.save(1, items={**items, "two": params()})
        checkpointer.restore(0, one=params())  # once more, and not taken
        assert two["two"] is not None
        with pytest.raises(ckpt.RestoredValueIgnored, match="'one'"):
            checkpointer.save(1, items={**items, "two": params()})
        assert checkpointer.restore(0, one=params())["one"] is not None
        assert checkpointer.save(1, items={**items, "two": two["two"]})


def test_steps_that_somebody_removed_are_saved_again(tmp_path):
    with open_at(tmp_path) as checkpointer:
        for step in range(5):
            checkpointer.save(step, params())
        for step in (3, 4):
            shutil.rmtree(tmp_path / str(step))
        assert checkpointer.save(3, params()) and not checkpointer.save(3, params())
        shutil.rmtree(tmp_path / "1")
        assert not checkpointer.save(1, params())  # training went on since
        assert checkpointer.save(4, params()) and checkpointer.all_steps() == [0, 2, 3, 4]
