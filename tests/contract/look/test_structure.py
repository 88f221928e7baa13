"""``ckpt diff``: two trees of the same leaves may still be two trees."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.command_line import make_call  # noqa: F401 (fixture)

pytest.importorskip("typer")
W = np.ones(2)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["act"])
@dataclasses.dataclass
class Layer:
    w: Any
    act: str = "relu"


class Pair(NamedTuple):
    a: Any
    b: Any


PAIRS = {
    "static": (Layer(W), Layer(W, "gelu"), 'act="relu" -> .*act="gelu"'),
    "None": ({"x": None}, {"x": {}}, "state/x: None -> empty dict"),
    "empty": ({"x": []}, {"x": ()}, "empty list -> empty tuple"),
    "list": ([W, W], (W, W), "state: list -> tuple"),
    "keys": ({"0": W}, {0: W}, "state/0: a leaf -> a leaf under an int"),
    "keys of containers": ({"0": [W]}, {0: [W]}, "state/0: list -> list under an int"),
    "named": (Pair(W, W), {"a": W, "b": W}, "namedtuple Pair -> dict"),
    "absent": ({"x": {}, "w": W}, {"w": W}, "state/x: empty dict -> nothing"),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_what_differs_is_reported(call, tmp_path, kind):
    one, other, reported = PAIRS[kind]
    for name, tree in (("a", one), ("b", other), ("again", one)):
        ckpt.save(tmp_path / name, tree)
    code, out, _ = call("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert re.search(reported, out), out
    code, _, _ = call("diff", tmp_path / "a", tmp_path / "again")
    assert code == 0


def test_what_leaves_show_is_reported_once(call, tmp_path):
    ckpt.save(tmp_path / "a", {"w": W, "x": {"y": W}})
    ckpt.save(tmp_path / "b", {"w": W})
    found = json.loads(call("diff", tmp_path / "a", tmp_path / "b", "--json")[1])
    assert found["only_a"] == ["state/x/y"]
    assert [(node["path"], node["b"]) for node in found["structure"]] == [("x", "nothing")]


def test_only_compares_what_lies_on_the_way(call, tmp_path):
    ckpt.save(tmp_path / "a", {"x": [W], "y": {"w": W}})
    ckpt.save(tmp_path / "b", {"x": (W,), "y": {"w": W}})
    for pattern, code in (("y/**", 0), ("x/**", 1)):
        assert call("diff", tmp_path / "a", tmp_path / "b", "--only", pattern)[0] == code
