"""``ckpt diff`` and ``ckpt stats``: two checkpoints of any format, compared leaf by leaf; numbers about one."""

import dataclasses
import functools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.command_line import Call, make_call, start  # noqa: F401 (fixture)
from tests.support.damage import turn_a_bit
from tests.support.stores import url_of_kind

pytest.importorskip("typer")
STATE: dict[str, Any] = {
    "layers": [{"w": np.arange(12.0).reshape(3, 4)}, {"w": jnp.ones((2, 2), jnp.bfloat16)}],
    "key": jax.random.key(3),
    "name": "a text",
    "step": 7,
    "raw": b"\0\1",
    "empty": np.zeros((0, 3)),
    "none": None,
}


def diff(call: Call, a: object, b: object, *more: object) -> dict[str, Any]:
    code, out, err = call("diff", a, b, "--json", *more)
    assert err == ""
    found = json.loads(out)
    assert code == (0 if found["same"] else 1)
    return found


def stats(call: Call, path: object, *more: object) -> list[dict[str, Any]]:
    return json.loads(call("stats", path, "--json", *more)[1])


@pytest.fixture(name="pair")
def make_pair(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint, and one of which every leaf differs that can."""
    other = {
        **STATE,
        "layers": [{"w": np.arange(12.0).reshape(3, 4) * 2}, {"w": jnp.ones((2, 3), jnp.bfloat16)}],
        "key": jax.random.key(4),
        "name": "another",
        "step": 8,
        "raw": b"\0\2",
        "new": np.float32(1),
    }
    del other["empty"]
    ckpt.save(tmp_path / "a", STATE, metadata={"lr": 1})
    ckpt.save(tmp_path / "b", other, metadata={"lr": 2})
    return tmp_path / "a", tmp_path / "b"


def test_itself(call, pair):
    found = diff(call, pair[0], pair[0])
    assert found["same"] and found["metadata"]
    assert (found["leaves"], found["compared"]) == ([], 7)
    code, out, _ = call("diff", pair[0], pair[0])
    assert code == 0 and "7 leaves are the same bit for bit, 0 differ" in out


def test_everything_that_differs(call, pair):
    found = diff(call, *pair)
    assert not found["same"] and not found["metadata"]
    assert (found["only_a"], found["only_b"]) == (["state/empty"], ["state/new"])
    by_path = {leaf["path"]: leaf for leaf in found["leaves"]}
    assert {path: leaf["kind"] for path, leaf in by_path.items()} == {
        "layers/0/w": "values",
        "layers/1/w": "shape",
        "key": "values",
        "name": "text",
        "step": "values",
        "raw": "values",
    }
    moved = by_path["layers/0/w"]
    assert [moved[name] for name in ("count", "changed", "largest")] == [12, 11, 11.0]
    assert math.isclose(moved["relative"], 1.0) and math.isclose(moved["cosine"], 1.0)
    assert math.isclose(moved["rms"], math.sqrt(506 / 12))
    assert by_path["step"]["largest"] == 1.0
    sides = by_path["layers/1/w"]["a"], by_path["layers/1/w"]["b"]
    assert sides == ("bfloat16[2, 2]", "bfloat16[2, 3]")
    found = diff(call, *pair, "--only", "layers/**")
    assert [leaf["path"] for leaf in found["leaves"]] == ["layers/1/w", "layers/0/w"]
    out = call("diff", *pair)[1]
    assert "11 of 12" in out and "only in A: state/empty" in out
    assert "bfloat16[2, 2] -> bfloat16[2, 3]" in out
    assert "leaves more" in call("diff", *pair, "--limit", 1)[1]


@pytest.mark.parametrize("kind", ["memory", "gs"])
def test_other_formats(call, request, tmp_path, kind):
    """The same weights from safetensors, from Orbax and from a bucket."""
    ocp = pytest.importorskip("orbax.checkpoint")
    weights = {"a": {"w": jnp.arange(6.0)}, "b": jnp.ones((2, 3), jnp.bfloat16)}
    ckpt.save(tmp_path / "ours", weights)
    ckpt.convert.export_safetensors(tmp_path / "ours", tmp_path / "x.safetensors")
    url = url_of_kind(request, kind)
    ckpt.save(url, weights)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", weights)
    for one, other in (("ours", "orbax"), (url, "orbax"), (url, "x.safetensors")):
        found = diff(call, tmp_path / one if one == "ours" else one, tmp_path / other)
        assert found["same"] and found["compared"] == 2


DTYPES = [
    *("bool", "int8", "uint64", "float16", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "int4"),
]


def test_every_dtype(call, tmp_path):
    def tree(values: list[int]) -> dict[str, Any]:
        array = np.array(values, np.int8)
        return {name: array.astype(getattr(ml_dtypes, name, name)) for name in DTYPES}

    ckpt.save(tmp_path / "a", tree([0, 1, 1, 0]))
    ckpt.save(tmp_path / "b", tree([0, 1, 0, 0]))
    found = diff(call, tmp_path / "a", tmp_path / "b")["leaves"]
    assert {(leaf["path"], leaf["changed"], leaf["largest"]) for leaf in found} == {
        (name, 1, 1.0) for name in DTYPES
    }
    for leaf in stats(call, tmp_path / "a"):
        assert (leaf["min"], leaf["max"], leaf["zero_count"]) == (0.0, 1.0, 2), leaf


def test_bits_count_not_values(call, tmp_path):
    """-0.0 is another number than 0.0, and NaN is the same as itself; between two dtypes values count."""
    one = np.array([0.0, np.nan, 1.0], np.float32)
    for name, values in (
        ("a", one),
        ("b", np.array([-0.0, np.nan, 1.0], np.float32)),
        ("wide", one.astype(np.float64)),
        ("half", np.array([0.0, np.nan, 1.001], np.float16)),
    ):
        ckpt.save(tmp_path / name, {"w": values})
    (leaf,) = diff(call, tmp_path / "a", tmp_path / "b")["leaves"]
    assert [leaf[name] for name in ("changed", "largest", "nan_a", "nan_b")] == [1, 0.0, 1, 1]
    (leaf,) = diff(call, tmp_path / "a", tmp_path / "wide")["leaves"]
    assert (leaf["kind"], leaf["changed"]) == ("dtype", 0)
    (leaf,) = diff(call, tmp_path / "a", tmp_path / "half")["leaves"]
    assert (leaf["kind"], leaf["changed"]) == ("dtype", 1) and 0 < leaf["largest"] < 0.01


def test_large_leaves(call, tmp_path):
    """They come in pieces, of which one differs; also beside one of another dtype, whose bytes are fewer."""
    values = np.arange(6000 * 1024, dtype=np.float32).reshape(6000, 1024) % 100
    changed = values.copy()
    changed[-1, -1] += 1
    ckpt.save(tmp_path / "a", {"w": values})
    ckpt.save(tmp_path / "b", {"w": changed})
    ckpt.save(tmp_path / "c", {"w": jnp.asarray(changed, jnp.bfloat16)})
    for other, kind in (("b", "values"), ("c", "dtype")):
        (leaf,) = diff(call, tmp_path / "a", tmp_path / other)["leaves"]
        assert (leaf["kind"], leaf["changed"], leaf["largest"]) == (kind, 1, 1.0)
    (w,) = stats(call, tmp_path / "a")
    assert (w["count"], w["min"], w["max"]) == (values.size, 0.0, 99.0)
    assert math.isclose(w["norm"], np.linalg.norm(values.astype(np.float64)))
    assert math.isclose(w["mean"], values.astype(np.float64).mean())
    assert math.isclose(w["std"], values.astype(np.float64).std())


def test_items_that_are_no_trees(call, tmp_path):
    """JSON is compared as text: NaN is itself, and true is not 1."""
    for name, text, config in (
        ("a", "a b", {"n": math.nan, "on": 1}),
        ("b", "a b", {"n": math.nan, "on": 1}),
        ("c", "a c", {"n": math.nan, "on": True}),
    ):
        (tmp_path / "vocab.txt").write_text(text)
        items = {"w": np.ones(3), "files": ckpt.Files(tmp_path / "vocab.txt")}
        ckpt.save(tmp_path / name, items={**items, "config": ckpt.Json(config)})
    found = diff(call, tmp_path / "a", tmp_path / "b")
    assert found["same"] and found["others"] == {"files": True, "config": True}
    found = diff(call, tmp_path / "a", tmp_path / "c")
    assert not found["same"] and found["others"] == {"files": False, "config": False}


def test_damage_is_reported(call, tmp_path):
    ckpt.save(tmp_path / "a", {"w": np.arange(100_000.0)})
    turn_a_bit(tmp_path / "a")
    for arguments, said in (
        (("diff", tmp_path / "a", tmp_path / "a"), "damaged"),
        (("stats", tmp_path / "a"), "damaged"),
        (("diff", tmp_path / "a", tmp_path / "nothing"), "no checkpoint"),
        (("stats", tmp_path / "a", "--only", "nothing"), "matches no leaf"),
    ):
        code, _, err = call(*arguments)
        assert code == 2 and said in err, err


def test_a_program_ends_after_one_side_was_damaged(tmp_path):
    """The threads that read the other side waited for ever, when the interpreter had stopped them."""
    for name in ("a", "b"):
        ckpt.save(tmp_path / name, {f"w{n}": np.full(10_000, float(n)) for n in range(9)})
    turn_a_bit(tmp_path / "b")
    done = start("diff", tmp_path / "a", tmp_path / "b", timeout_secs=60)
    assert (done.returncode, "damaged" in done.stderr) == (2, True)


def test_diff_takes_the_newest_step(call, tmp_path):
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": np.full(3, step)})
    assert diff(call, tmp_path / "run", tmp_path / "run" / "2")["same"]
    assert not diff(call, tmp_path / "run", tmp_path / "run" / "1")["same"]


def test_stats_finds_what_is_not_finite(call, tmp_path):
    ckpt.save(tmp_path / "a", STATE)
    code, out, _ = call("stats", tmp_path / "a")
    assert code == 0 and "layers/0/w" in out
    ckpt.save(tmp_path / "b", {"w": np.array([1, np.nan, np.inf, 0]), "[red]": np.ones(1)})
    code, out, _ = call("stats", tmp_path / "b")
    assert code == 1 and "[red]" in out
    (found,) = stats(call, tmp_path / "b", "--only", "w")
    assert (found["nan_count"], found["inf_count"], found["zero_count"]) == (1, 1, 1)
    assert (found["min"], found["max"]) == (0.0, 1.0)


def test_a_pattern_that_one_side_alone_has_is_a_difference(call, tmp_path):
    ckpt.save(tmp_path / "a", {"x": 1, "y": 2})
    ckpt.save(tmp_path / "b", {"x": 1})
    assert diff(call, tmp_path / "a", tmp_path / "b", "--only", "y")["only_a"] == ["state/y"]
    assert diff(call, tmp_path / "b", tmp_path / "a", "--only", "y")["only_b"] == ["state/y"]
    code, _, err = call("diff", tmp_path / "a", tmp_path / "b", "--only", "z")
    assert code == 2 and "matches no leaf" in err


W = np.ones(2)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["act"])
@dataclasses.dataclass
class Layer:
    w: Any
    act: Any = "relu"


class Pair(NamedTuple):
    a: Any
    b: Any


PAIRS = {
    "static": (Layer(W), Layer(W, "gelu"), 'act="relu" -> .*act="gelu"'),
    "a part of it": (Layer(W, (np.sin, 4)), Layer(W, (np.sin, 8)), "act/1: static 4 -> static 8"),
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


@pytest.mark.parametrize("columns", [60, 80, 119, 120, 200])
def test_no_number_is_broken_on_a_terminal(call, tmp_path, monkeypatch, columns):
    one = np.random.default_rng(0).normal(size=(3, 64, 64)) * 1e-3
    name = "encoder_layer_0_self_attention_query_kernel"
    both = {name: {"kernel": one}, "same": np.ones(2), "ids": [1, 2]}
    ckpt.save(tmp_path / "a", {**both, "gone": 1})
    changed = {
        name: {"kernel": np.where(one > 0, np.nan, one * -3.2e8)},
        "ids": (1, 2),
        "new": 1,
        "n": 2,
    }
    ckpt.save(tmp_path / "b", {**both, **changed})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for variable, value in (("COLUMNS", str(columns)), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(variable, value)
    plain = re.compile(r"\x1b\[[0-9;]*m")
    for command in (["diff", tmp_path / "a", tmp_path / "b"], ["stats", tmp_path / "b"]):
        lines = [plain.sub("", line).rstrip() for line in call(*command)[1].splitlines()]
        for line in lines:
            assert len(line) <= columns or line == f"state/{name}/kernel", line
        monkeypatch.setenv("COLUMNS", "1000")
        numbers = re.findall(r"\S*\d\S*", plain.sub("", call(*command)[1]))
        monkeypatch.setenv("COLUMNS", str(columns))
        whole = [one for one in numbers if name[:3] not in one and "/" not in one]
        assert len(whole) > 10 and set(whole) <= {*" ".join(lines).split()}
        if command[0] == "diff":
            summary = " ".join(" ".join(lines).split())
            assert summary.endswith("differ, 1 only in A, 2 only in B; 1 container differs")


def test_numbers_whose_squares_are_no_floats(call, tmp_path):
    ckpt.save(
        tmp_path / "a", {"big": np.array([1e200, 2e200]), "best": np.float64(sys.float_info.max)}
    )
    ckpt.save(
        tmp_path / "b", {"big": np.array([1e200, 4e200]), "best": np.float64(sys.float_info.max)}
    )
    by_path = {one["path"]: one for one in stats(call, tmp_path / "a")}
    assert by_path["best"]["norm"] == sys.float_info.max
    assert by_path["best"]["std"] == 0
    (changed,) = diff(call, tmp_path / "a", tmp_path / "b")["leaves"]
    assert changed["relative"] == pytest.approx(0.8944, abs=1e-4)
