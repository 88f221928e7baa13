"""``partial_restore``: what the target names is restored, and what the checkpoint lacks stays; as Orbax does."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest

import ckpt_orbax
from tests.support.trees import Moments

BOTH = [orbax.checkpoint, ckpt_orbax]


def state() -> Any:
    return {
        "a": jnp.arange(4.0),
        "b": {"c": jnp.ones(2), "d": 3},
        "l": [jnp.zeros(1), jnp.ones(1), jnp.full(1, 2.0)],
        "p": Moments(jnp.ones(3), 4),
        "n": 5,
    }


def zeros(*shape: int) -> Any:
    return jnp.zeros(shape)


FITS = {
    "a subtree without a leaf that is there": lambda: {"b": {"c": zeros(2), "e": jnp.full(3, 7.0)}},
    "a new subtree": lambda: {"a": zeros(4), "z": {"q": jnp.full(3, 7.0), "r": [8, 9]}},
    "a number": lambda: {"a": zeros(4), "m": 9},
    "a placeholder": lambda: {"a": zeros(4), "m": ..., "b": {"e": ...}},
    "None": lambda: {"a": None, "m": None},
    "numpy": lambda: {"a": zeros(4), "m": np.full(2, 3)},
    "nothing in common": lambda: {"z": zeros(2)},
    "a list": lambda: {"l": [zeros(1)] * 3},
    "a tuple for a list": lambda: {"l": (zeros(1),) * 3},
    "a NamedTuple": lambda: {"p": Moments(zeros(3), 0), "q": Moments(1, 2)},
    "an empty dict": lambda: {"a": zeros(4), "z": {}},
}
DIFFERS = {
    "a list that is too short": lambda: {"l": [zeros(1)] * 2},
    "a list that is too long": lambda: {"l": [zeros(1)] * 4},
    "a dict for a leaf": lambda: {"a": {"x": zeros(4)}},
    "a leaf for a dict": lambda: {"b": zeros(2)},
    "a dict for a list": lambda: {"l": {"0": zeros(1)}},
}


def comparable(tree: Any) -> Any:
    """A tree that can be compared: arrays as type, dtype and values."""

    def leaf(value: Any) -> Any:
        if isinstance(value, (jax.Array, np.ndarray)):
            return isinstance(value, jax.Array), str(value.dtype), np.asarray(value).tolist()
        return value

    return jax.tree.map(leaf, tree)


def by_item(ocp: Any, path: Any, target: Any) -> Any:
    return ocp.PyTreeCheckpointer().restore(path / "one", item=target, partial_restore=True)


def by_args(ocp: Any, path: Any, target: Any) -> Any:
    with ocp.CheckpointManager(path / "run") as manager:
        return manager.restore(0, args=ocp.args.PyTreeRestore(target, partial_restore=True))


def by_restore_args(ocp: Any, path: Any, target: Any) -> Any:
    args = ocp.checkpoint_utils.construct_restore_args(target)
    checkpointer = ocp.PyTreeCheckpointer()
    return checkpointer.restore(path / "one", item=target, restore_args=args, partial_restore=True)


WAYS = [by_item, by_args, by_restore_args]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    places = {}
    for ocp in BOTH:
        places[ocp] = path = tmp_path_factory.mktemp("saved")
        ocp.PyTreeCheckpointer().save(path / "one", state())
        with ocp.CheckpointManager(path / "run") as manager:
            manager.save(0, args=ocp.args.PyTreeSave(state()))
    return places


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")  # of Orbax
@pytest.mark.parametrize(("name", "way"), list(zip(FITS, itertools.cycle(WAYS))))
def test_what_the_checkpoint_lacks_stays(saved, name, way):
    target = FITS[name]
    expected = comparable(way(BOTH[0], saved[BOTH[0]], target()))
    assert comparable(way(ckpt_orbax, saved[ckpt_orbax], target())) == expected
    assert comparable(way(ckpt_orbax, saved[BOTH[0]], target())) == expected


@pytest.mark.parametrize(("name", "way"), list(zip(DIFFERS, itertools.cycle(WAYS))))
def test_what_does_not_fit_is_an_error(saved, name, way):
    for ocp in BOTH:
        with pytest.raises((ValueError, TypeError)) as caught:
            way(ocp, saved[ocp], DIFFERS[name]())
    assert "wanted" in str(caught.value)
    assert next(iter(DIFFERS[name]())) in str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_placeholder_for_a_saved_leaf_leaves_it_out(saved, way):
    """Orbax does so with ``restore_args``, and restores the leaf without."""
    target = {"l": [..., zeros(1), ...], "b": {"c": ...}}
    expected = comparable(by_restore_args(BOTH[0], saved[BOTH[0]], target))
    assert expected["l"][0] is ... and expected["b"]["c"] is ...
    assert comparable(way(ckpt_orbax, saved[ckpt_orbax], target)) == expected
