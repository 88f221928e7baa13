"""Two checkpoints of any format, compared leaf by leaf; numbers about one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._look import leaves
from ckpt_core._look.difference import compare
from ckpt_core._look.statistics import leaf_statistics
from ckpt_core.cli._app import app
from tests.support.damage import turn_a_bit
from tests.support.stores import url_of_kind

STATE: dict[str, Any] = {
    "layers": [{"w": np.arange(12.0).reshape(3, 4)}, {"w": jnp.ones((2, 2), jnp.bfloat16)}],
    "key": jax.random.key(3),
    "name": "a text",
    "step": 7,
    "raw": b"\0\1",
    "empty": np.zeros((0, 3)),
    "none": None,
}


def run(*arguments: str) -> int:
    return int(app(list(arguments), standalone_mode=False) or 0)


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


def test_itself(pair: tuple[Path, Path]) -> None:
    found = compare(pair[0], pair[0])
    assert found.same
    assert found.metadata
    assert {leaf.kind for leaf in found.leaves} == {"same"}
    assert len(found.leaves) == 7


def test_everything_that_differs(pair: tuple[Path, Path]) -> None:
    found = compare(*pair)
    assert not found.same
    assert not found.metadata
    assert found.only_a == ["state/empty"]
    assert found.only_b == ["state/new"]
    by_path = {leaf.path: leaf for leaf in found.changed}
    assert {path: leaf.kind for path, leaf in by_path.items()} == {
        "layers/0/w": "values",
        "layers/1/w": "shape",
        "key": "values",
        "name": "text",
        "step": "values",
        "raw": "values",
    }
    moved = by_path["layers/0/w"]
    assert (moved.count, moved.changed, moved.largest, moved.relative) == (12, 11, 11.0, 1.0)
    assert math.isclose(moved.cosine, 1.0)
    assert by_path["step"].largest == 1.0
    assert (by_path["layers/1/w"].a, by_path["layers/1/w"].b) == (
        "bfloat16[2, 2]",
        "bfloat16[2, 3]",
    )
    assert compare(*pair, only="layers/1/*").only_a == []


def test_another_dtype(tmp_path: Path) -> None:
    a = np.array([1.0, 2.0, 3.001], np.float32)
    ckpt.save(tmp_path / "a", {"w": a})
    ckpt.save(tmp_path / "b", {"w": a.astype(jnp.bfloat16)})
    (leaf,) = compare(tmp_path / "a", tmp_path / "b").changed
    assert (leaf.kind, leaf.changed) == ("dtype", 1)
    assert 0 < leaf.largest < 0.01


@pytest.mark.parametrize("kind", ["memory", "gs"])
def test_other_formats(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    """The same weights from safetensors, from Orbax and from a bucket."""
    ocp = pytest.importorskip("orbax.checkpoint")
    weights = {"a": {"w": jnp.arange(6.0)}, "b": jnp.ones((2, 3), jnp.bfloat16)}
    ckpt.save(tmp_path / "ours", weights)
    ckpt.convert.export_safetensors(tmp_path / "ours", tmp_path / "x.safetensors")
    url = url_of_kind(request, kind)
    ckpt.save(url, weights)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", weights)
    assert compare(tmp_path / "ours", tmp_path / "orbax").same
    assert compare(url, tmp_path / "orbax").same
    found = compare(url, tmp_path / "x.safetensors")
    assert found.same
    assert [leaf.path for leaf in found.leaves] == ["a/w", "b"]
    safetensors = pytest.importorskip("safetensors.numpy")
    same = tmp_path / "same.safetensors"
    safetensors.save_file({"a/w": np.ones(3), "a.w": np.zeros(3)}, same)
    assert len(compare(same, same).leaves) == 2


def test_large_leaves_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "PIECE_BYTES", 4096)
    values = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
    ckpt.save(tmp_path / "a", {"w": values, "small": np.ones(3)})
    changed = values.copy()
    changed[-1, -1] = 0
    ckpt.save(tmp_path / "b", {"w": changed, "small": np.ones(3)})
    trees = leaves.Trees(tmp_path / "a", None, ckpt.Options())
    (item,) = trees.items
    sizes = [piece.nbytes for piece in trees.pieces(item, trees.items[item])]
    assert max(sizes) <= 4096
    assert sum(sizes) == values.nbytes + 24
    (leaf,) = compare(tmp_path / "a", tmp_path / "b").changed
    assert (leaf.path, leaf.changed, leaf.largest) == ("w", 1, 64 * 1024 - 1)
    (w,) = leaf_statistics(tmp_path / "a", only="w")
    assert (w.count, w.min, w.max) == (values.size, 0.0, 65535.0)
    assert math.isclose(w.norm, np.linalg.norm(values.astype(np.float64)))


def test_items_that_are_no_trees(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a b")
    for name, text, config in (
        ("a", "a b", {"n": 1}),
        ("b", "a b", {"n": 1}),
        ("c", "a c", {"n": 2}),
    ):
        (tmp_path / "vocab.txt").write_text(text)
        items = {"w": np.ones(3), "files": ckpt.Files(tmp_path / "vocab.txt")}
        ckpt.save(tmp_path / name, items={**items, "config": ckpt.Json(config)})
    assert compare(tmp_path / "a", tmp_path / "b").others == {"files": True, "config": True}
    assert compare(tmp_path / "a", tmp_path / "b").same
    assert compare(tmp_path / "a", tmp_path / "c").others == {"files": False, "config": False}
    assert not compare(tmp_path / "a", tmp_path / "c").same


def test_damage_is_reported(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", {"w": np.arange(100_000.0)})
    (data,) = (path for path in (tmp_path / "a").rglob("*") if path.stat().st_size > 100_000)
    content = bytearray(data.read_bytes())
    content[1000] ^= 1
    data.write_bytes(content)
    with pytest.raises(ckpt.CheckpointCorrupt):
        compare(tmp_path / "a", tmp_path / "a")
    with pytest.raises(ckpt.CheckpointCorrupt):
        list(leaf_statistics(tmp_path / "a"))
    with pytest.raises(ckpt.CheckpointNotFound):
        compare(tmp_path / "a", tmp_path / "nothing")
    with pytest.raises(ckpt.CheckpointNotFound, match="matches no leaf"):
        list(leaf_statistics(tmp_path / "a", only="nothing"))


# ---- the commands ------------------------------------------------------------------------------


def test_diff_says_it_with_its_exit_code(pair: tuple[Path, Path], capsys: Any) -> None:
    a, b = map(str, pair)
    assert run("diff", a, a) == 0
    assert "7 leaves are the same bit for bit, 0 differ" in capsys.readouterr().out
    assert run("diff", a, b) == 1
    out = capsys.readouterr().out
    assert "11 of 12" in out
    assert "only in A: state/empty" in out
    assert "bfloat16[2, 2] -> bfloat16[2, 3]" in out
    assert run("diff", a, b, "--json", "--only", "layers/**") == 1
    reported = json.loads(capsys.readouterr().out)
    assert [leaf["path"] for leaf in reported["leaves"]] == ["layers/1/w", "layers/0/w"]
    assert run("diff", a, b, "--limit", "1") == 1
    assert "leaves more" in capsys.readouterr().out


def test_diff_takes_the_newest_step(tmp_path: Path, capsys: Any) -> None:
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": np.full(3, step)})
    assert run("diff", str(tmp_path / "run"), str(tmp_path / "run" / "2")) == 0
    assert run("diff", str(tmp_path / "run"), str(tmp_path / "run" / "1")) == 1
    capsys.readouterr()


def test_stats_finds_what_is_not_finite(tmp_path: Path, capsys: Any) -> None:
    ckpt.save(tmp_path / "a", STATE)
    assert run("stats", str(tmp_path / "a")) == 0
    assert "layers/0/w" in capsys.readouterr().out
    ckpt.save(tmp_path / "b", {"w": np.array([1, np.nan, np.inf, 0]), "[red]": np.ones(1)})
    assert run("stats", str(tmp_path / "b")) == 1
    assert "[red]" in capsys.readouterr().out
    assert run("stats", str(tmp_path / "b"), "--json", "--only", "w") == 1
    (reported,) = json.loads(capsys.readouterr().out)
    assert (reported["nan_count"], reported["inf_count"], reported["zero_count"]) == (1, 1, 1)
    assert (reported["min"], reported["max"]) == (0.0, 1.0)


def test_the_commands_need_no_jax(pair: tuple[Path, Path], run_python: Any) -> None:
    code = (
        "import json, sys\nfrom ckpt_core.cli._app import app\n"
        "codes = [app(call, standalone_mode=False) for call in (['diff', *sys.argv[1:]], ['stats', sys.argv[1]])]\n"
        "print(json.dumps([codes, 'jax' in sys.modules]))\n"
    )
    assert run_python(code, *map(str, pair)) == [[1, 0], False]


def test_a_large_leaf_of_another_dtype_is_compared_by_value(tmp_path: Path, monkeypatch: Any):
    """It is read in the same pieces on both sides, though its bytes are fewer on one."""
    monkeypatch.setattr(leaves, "PIECE_BYTES", 4096)
    values = np.arange(60 * 64, dtype=np.float32).reshape(60, 64) % 100
    ckpt.save(tmp_path / "a", {"w": values})
    ckpt.save(tmp_path / "b", {"w": jnp.asarray(values + (values == 7), jnp.bfloat16)})
    for one, other in (("a", "b"), ("b", "a")):
        (leaf,) = compare(tmp_path / one, tmp_path / other).leaves
        assert (leaf.kind, leaf.count) == ("dtype", values.size)
        assert (leaf.changed, leaf.largest) == (np.count_nonzero(values == 7), 1.0)


def test_a_pattern_that_one_side_alone_has_is_a_difference(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", {"x": 1, "y": 2})
    ckpt.save(tmp_path / "b", {"x": 1})
    assert compare(tmp_path / "a", tmp_path / "b", only="y").only_a == ["state/y"]
    assert compare(tmp_path / "b", tmp_path / "a", only="y").only_b == ["state/y"]
    with pytest.raises(ckpt.CheckpointNotFound, match="matches no leaf"):
        compare(tmp_path / "a", tmp_path / "b", only="z")


def test_items_of_json_are_compared_as_text(tmp_path: Path) -> None:
    """NaN is itself, and true is not 1."""
    for name, value in {"nan": math.nan, "one": 1, "true": True}.items():
        ckpt.save(tmp_path / name, params={"w": np.ones(1)}, config=ckpt.Json({"a": value}))
    assert compare(tmp_path / "nan", tmp_path / "nan").others == {"config": True}
    assert compare(tmp_path / "one", tmp_path / "true").others == {"config": False}


def test_a_program_ends_after_one_side_was_damaged(tmp_path: Path) -> None:
    """The threads that read the other side waited for ever, when the interpreter had stopped them."""
    for name in ("a", "b"):
        ckpt.save(tmp_path / name, {f"w{n}": np.full(10_000, float(n)) for n in range(9)})
    turn_a_bit(tmp_path / "b")
    command = [sys.executable, "-m", "ckpt_core.cli", "diff", tmp_path / "a", tmp_path / "b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "damaged" in done.stderr) == (2, True)
