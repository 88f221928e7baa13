"""``only=``: every pattern matches something, whoever reads it, and however often it can be read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.own import Own

STATE = {"params": {"w": np.ones(3, np.float32), "b": np.zeros(2, np.float32)}, "step": 7}


@pytest.fixture
def path(tmp_path):
    ckpt.save(tmp_path / "one", STATE)
    return tmp_path / "one"


@pytest.mark.parametrize(
    ("only", "advice"),
    [
        (["params", "step"], r"'params' matches no leaf.*'params/\*\*' takes all leaves below"),
        (["params/", "step"], r"'params/\*\*'"),
        ("params", r"only='params' matches no leaf.*'params/\*\*'"),
        (["parms/**", "step"], r"'parms/\*\*' matches no leaf"),
        (("params/w", "stepp"), "'stepp' matches no leaf.*nearest name is 'step'"),
        ([], "matches no leaf"),
    ],
)
@pytest.mark.parametrize("with_target", [False, True])
def test_one_idle_pattern_among_several_is_refused(path, only, advice, with_target):
    target = (STATE,) if with_target else ()
    with pytest.raises(ckpt.CheckpointNotFound, match=advice):
        ckpt.load(path, *target, only=only)


def test_patterns_that_all_match(path, tmp_path):
    assert ckpt.load(path, only=["params/**", "step"])["step"] == 7
    assert ckpt.load(path, only=["state/step", "**/w"]).keys() == {"params", "step"}
    ckpt.save(tmp_path / "root", np.arange(3))
    assert ckpt.load(tmp_path / "root", only=["(root)"]).shape == (3,)


def test_a_pattern_may_name_what_only_the_target_has(path):
    like = {**STATE, "ema": 3}
    loaded = ckpt.load(path, like, only=["ema", "step"], missing="keep")
    assert (loaded["ema"], loaded["step"]) == (3, 7)


def test_patterns_of_several_items(tmp_path):
    ckpt.save(tmp_path / "two", model={"w": jnp.ones(2)}, opt={"m": jnp.ones(2)}, note=ckpt.Json(1))
    both = ["model/w", "opt/m"]
    assert ckpt.load(tmp_path / "two", only=[*both, "note"]).keys() == {"model", "opt", "note"}
    with pytest.raises(ckpt.CheckpointNotFound, match="'opt' matches no leaf"):
        ckpt.load(tmp_path / "two", only=["model/w", "opt"])


@pytest.mark.parametrize("make", [iter, set, lambda texts: (text for text in texts)])
def test_a_generator_is_read_once_for_all_items(tmp_path, make):
    tree = {"w": np.ones(2), "v": np.ones(2)}
    ckpt.save(tmp_path / "two", a=tree, b=tree)
    like = {"a": {"w": np.zeros(2)}, "b": {"w": np.zeros(2)}}
    for call in (ckpt.load, lambda *args, **more: ckpt.load_async(*args, **more).result()):
        loaded = call(tmp_path / "two", only=make(["w", "**/w"]))
        assert [tuple(loaded[name]) for name in ("a", "b")] == [("w",), ("w",)]
        loaded = call(tmp_path / "two", like, only=make(["w"]))
        assert [loaded[name]["w"].tolist() for name in ("a", "b")] == [[1, 1], [1, 1]]


def test_patterns_are_text(path):
    with pytest.raises(TypeError, match="patterns are text"):
        ckpt.load(path, only=[b"step"])


def test_a_pattern_may_name_an_item_that_is_not_restored(tmp_path):
    ckpt.save(tmp_path / "two", model={"w": np.ones(2)}, fit={"step": 3}, note=ckpt.Json(1))
    only = ["model/w", "fit/**", "note/**"]
    assert ckpt.restore(tmp_path / "two", model={"w": np.zeros(2)}, only=only)["model"]["w"][0] == 1
    with pytest.raises(ckpt.CheckpointNotFound, match="matches no leaf"):
        ckpt.restore(tmp_path / "two", model={"w": np.zeros(2)}, only=only[1:])
    with pytest.raises(ckpt.CheckpointNotFound, match="'fitt/"):
        ckpt.restore(tmp_path / "two", model={"w": np.zeros(2)}, only=["model/w", "fitt/**"])


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("w/**", {"n": [0, 0], "m": {"k": 0, "name": "before"}}),
        (["w/**", "e/n"], {"n": [1, 1], "m": {"k": 0, "name": "before"}}),
        ("e/m/**", {"n": [0, 0], "m": {"k": 1, "name": "saved"}}),
        ("e/m/k", {"n": [0, 0], "m": {"k": 1, "name": "before"}}),
        ("e/**", {"n": [1, 1], "m": {"k": 1, "name": "saved"}}),
    ],
)
@pytest.mark.parametrize("as_jax", [False, True])
def test_an_object_keeps_what_is_not_selected(tmp_path, only, expected, as_jax):
    full = jnp.full if as_jax else np.full
    saved = Own(n=full(2, 1), m={"k": 1, "name": "saved"})
    ckpt.save(tmp_path / "c", items={"e": saved, "w": {"a": np.ones(3)}})
    target = Own(n=full(2, 0), m={"k": 0, "name": "before"})
    tree: Any = {"a": np.zeros(3)}
    found = ckpt.restore(tmp_path / "c", items={"e": target, "w": tree}, only=only)
    assert target.n.tolist() == expected["n"]
    assert target.m == expected["m"]
    assert isinstance(target.n, jax.Array if as_jax else np.ndarray)
    assert found["e"] is target
    assert found["w"]["a"].tolist() == ([1.0] * 3 if "w/**" in only else [0.0] * 3)


def test_an_object_without_what_is_left_out_is_not_changed(tmp_path):
    ckpt.save(tmp_path / "c", items={"e": Own(n=1, m={"k": 1})})
    target = Own(n=0)
    with pytest.raises(ckpt.StructureMismatch, match=r"m/k.*not in the target"):
        ckpt.restore(tmp_path / "c", items={"e": target}, only="e/n")
    assert vars(target) == {"n": 0}
    ckpt.restore(tmp_path / "c", items={"e": target}, only="e/**")
    assert vars(target) == {"n": 1, "m": {"k": 1}}
