"""``.npz`` in and out: every array to the bit, and what cannot be one is reported."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import export_npz, import_weights
from tests.support.same_bits import bits

ARRAYS: dict[str, Any] = {
    "layer.w": np.arange(6.0).reshape(2, 3),
    "layer.b": np.arange(3, dtype=np.float16),
    "fortran": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    "zero": np.array(3, np.uint64),
    "empty": np.zeros((0, 2), bool),
    "complex": np.array([1j, 2], np.complex64),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_array(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.npz", **ARRAYS)
    import_weights(tmp_path / "a.npz", tmp_path / "a")
    found = ckpt.load(tmp_path / "a")
    assert {name: bits(array) for name, array in found.items()} == {
        name: bits(np.ascontiguousarray(array).reshape(array.shape))
        for name, array in ARRAYS.items()
    }
    assert ckpt.verify(tmp_path / "a").ok
    (written,) = export_npz(tmp_path / "a", tmp_path / "b.npz")
    with np.load(written) as again:
        assert jax.tree.map(bits, {**again}) == jax.tree.map(bits, found)
    with zipfile.ZipFile(written) as archive:
        assert archive.testzip() is None


def test_levels_names_and_selection(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **ARRAYS)
    import_weights(
        tmp_path / "a.npz",
        tmp_path / "a",
        item="model",
        only=["layer.*"],
        rename={"layer": "block/0"},
        split=".",
    )
    found = ckpt.load(tmp_path / "a")
    assert sorted(found["model"]["block"]["0"]) == ["b", "w"]
    with pytest.raises(ckpt.StructureMismatch, match="lair"):
        import_weights(tmp_path / "a.npz", tmp_path / "b", rename={"lair": "x"})
    with pytest.raises(ckpt.CheckpointNotFound, match="matches nothing"):
        import_weights(tmp_path / "a.npz", tmp_path / "b", only="lair.*")
    np.savez(tmp_path / "b.npz", **{"a": np.ones(1), "a.b": np.ones(1)})
    with pytest.raises(ckpt.CheckpointError, match=r"a/b, or one inside of the other: rename"):
        import_weights(tmp_path / "b.npz", tmp_path / "b", split=".")
    np.savez(tmp_path / "c.npz", **{"a..b": np.ones(1)})
    with pytest.raises(ckpt.CheckpointError, match="a level without a name"):
        import_weights(tmp_path / "c.npz", tmp_path / "b", split=".")
    assert not (tmp_path / "b").exists()


def test_rules_and_a_target(tmp_path: Path) -> None:
    tensors = {f"l.{n}.q": np.arange(24.0, dtype=np.float32).reshape(6, 4) + n for n in range(3)}
    np.savez(tmp_path / "a.npz", **tensors, rest=np.ones(2, np.float32))
    cut = ckpt.Rule("l.{n}.q", "layers/q", reshape=((0, 1), 2), transpose=(2, 0, 1), stack=("n",))
    like = {"layers": {"q": jnp.zeros((3, 4, 2, 3))}, "rest": np.zeros(2, np.float32)}
    import_weights(tmp_path / "a.npz", tmp_path / "a", rules=[cut], like=like)
    found = ckpt.load(tmp_path / "a")
    by_hand = np.stack([one.reshape(2, 3, 4).transpose(2, 0, 1) for one in tensors.values()])
    assert bits(found["layers"]["q"]) == bits(by_hand)
    assert type(found["layers"]["q"]) is not type(found["rest"]) is np.ndarray
    with pytest.raises(ckpt.StructureMismatch, match="a leaf with a shape"):
        import_weights(tmp_path / "a.npz", tmp_path / "b", rules=[cut])
    wrong = {"layers": like["layers"], "more": np.ones(1)}
    with pytest.raises(ckpt.StructureMismatch) as raised:
        import_weights(tmp_path / "a.npz", tmp_path / "b", rules=[cut], like=wrong)
    assert {one.kind for one in raised.value.mismatches} == {"missing", "unexpected"}
    turned = ckpt.Rule("l.{n}.q", "layers/{n}/q", transpose=(1, 0))
    import_weights(tmp_path / "a.npz", tmp_path / "b", rules=[turned])
    assert bits(ckpt.load(tmp_path / "b")["layers"]["2"]["q"]) == bits(tensors["l.2.q"].T.copy())
    joined = ckpt.Rule(("l.0.q", "l.1.q"), "both", axis=1)
    import_weights(tmp_path / "a.npz", tmp_path / "c", rules=[joined], only=["l.0.q", "l.1.q"])
    both = np.concatenate([tensors["l.0.q"], tensors["l.1.q"]], 1)
    assert bits(ckpt.load(tmp_path / "c")["both"]) == bits(both)


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def written(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


class Harm:
    def __reduce__(self) -> Any:
        return (open, ("harm", "w"))


@pytest.mark.parametrize(
    ("members", "error", "reported"),
    [
        ({"a.npy": npy(np.array([Harm()], object))}, ckpt.UnsupportedLeaf, "Python objects"),
        ({"a.npy": npy(np.array(["text"]))}, ckpt.UnsupportedLeaf, "holds no str"),
        ({"a.npy": npy(np.zeros(2, "V2"))}, ckpt.UnsupportedLeaf, "bfloat16.*safetensors"),
        ({"a.npy": npy(np.zeros(2, "M8[s]"))}, ckpt.UnsupportedLeaf, "holds no datetime64"),
        ({"a.npy": npy(np.ones(9))[:-3]}, ckpt.CheckpointCorrupt, "cut short"),
        ({"a.npy": npy(np.ones(9)), "b.txt": b"x"}, ckpt.UnsupportedLeaf, "b.txt is no array"),
    ],
)
def test_what_is_refused(tmp_path: Path, members: Any, error: Any, reported: str, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "a.npz", members)
    with pytest.raises(error, match=reported) as raised:
        import_weights(path, tmp_path / "out")
    assert "a.npz" in str(raised.value)
    assert [one.name for one in tmp_path.iterdir()] == ["a.npz"]


def test_a_flipped_bit_and_a_cut_file(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, a=np.zeros(1000))
    whole = path.read_bytes()
    path.write_bytes(whole[:3000] + b"\1" + whole[3001:])
    with pytest.raises(ckpt.CheckpointCorrupt, match="CRC"):
        import_weights(path, tmp_path / "out")
    path.write_bytes(whole[:-100])
    with pytest.raises(ckpt.CheckpointCorrupt, match="cut short"):
        import_weights(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_that_an_archive_would_cut_short_are_refused(tmp_path: Path) -> None:
    """Two of them became one array, in silence."""
    ckpt.save(tmp_path / "one", {"a\0b": jnp.zeros(2), "a\0c": jnp.ones(2)})
    with pytest.raises(ckpt.CheckpointError, match="zero byte"):
        export_npz(tmp_path / "one", tmp_path / "a.npz")
    assert not (tmp_path / "a.npz").exists()


def test_a_rule_renames_a_scalar(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", one=np.float32(3))
    import_weights(tmp_path / "a.npz", tmp_path / "out", rules=[ckpt.Rule("one", "other")])
    assert float(ckpt.load(tmp_path / "out")["other"]) == 3
