"""``.npz`` and files of Flax, in and out; and from which checkpoints weights are exported and imported."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import export_npz, import_weights
from tests.support.refusals import refuse
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


serialization = pytest.importorskip("flax.serialization")
OF_FLAX: dict[str, Any] = {
    "w": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
    "f8": jnp.ones(3, jnp.float8_e4m3fn),
    "wide": np.arange(3.0),
    "flags": np.array([True, False]),
    "none": np.zeros((0, 4), np.float32),
    "zero": np.array(7, np.uint8),
    "complex": np.array([1j], np.complex64),
}


def test_every_array_and_number(tmp_path: Path) -> None:
    tree = {
        "params": {"dense": OF_FLAX},
        "steps": [1, -1, 200, 70_000, 2**40, -(2**40), 1.5, True, None, "text", 2 - 1j],
        "scalar": np.float32(3),
        "long": {f"k{n}": n for n in range(20)},
        "text": "x" * 70_000,
    }
    (tmp_path / "a").write_bytes(serialization.msgpack_serialize(tree))
    import_weights(tmp_path / "a", tmp_path / "c")
    found = ckpt.load(tmp_path / "c")
    assert jax.tree.map(bits, found["params"]["dense"]) == jax.tree.map(bits, OF_FLAX)
    assert found["steps"] == tree["steps"]
    assert (found["long"], found["text"]) == (tree["long"], tree["text"])
    assert bits(np.asarray(found["scalar"])) == bits(np.asarray(np.float32(3)))


def test_arrays_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 64)
    tree = {"a": {"big": np.arange(60, dtype=np.float32).reshape(5, 12)}, "b": np.ones(2, np.int8)}
    (tmp_path / "a.msgpack").write_bytes(serialization.msgpack_serialize(tree))
    assert b"chunked" in (tmp_path / "a.msgpack").read_bytes()
    import_weights(tmp_path / "a.msgpack", tmp_path / "c")
    found = ckpt.load(tmp_path / "c")
    assert bits(found["a"]["big"]) == bits(tree["a"]["big"])
    assert bits(found["b"]) == bits(tree["b"])


def test_a_train_state_of_linen_goes_on(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    linen = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")
    model = linen.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
    (tmp_path / "checkpoint_1").write_bytes(serialization.to_bytes(state))
    import_weights(tmp_path / "checkpoint_1", tmp_path / "c")
    again = serialization.from_state_dict(state, ckpt.load(tmp_path / "c"))
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_damage_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    whole = serialization.msgpack_serialize(
        {"a": np.arange(40.0), "b": {"c": "text", "d": 1 << 40}}
    )
    file = tmp_path / "a.msgpack"
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"a\.msgpack"):
        import_weights(file, tmp_path / "c")
    file.write_bytes(b"\x81\xa1a\xd4\x09\x00")  # an extension that is not Flax's
    with pytest.raises(ckpt.UnsupportedLeaf, match="a is a ExtType"):
        import_weights(file, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_safetensors_in_several_files(tmp_path: Path) -> None:
    state = {"a": {"w": jnp.ones((64, 8), jnp.bfloat16)}, "b": jnp.arange(512.0), "n": np.arange(3)}
    ckpt.save(tmp_path / "one", state)
    ckpt.convert.export_safetensors(tmp_path / "one", tmp_path / "hub", max_shard_bytes=2048)
    import_weights(tmp_path / "hub", tmp_path / "two", split=".")
    found = ckpt.load(tmp_path / "two")
    assert jax.tree.all(jax.tree.map(lambda a, b: bits(a) == bits(b), found, state))
    assert isinstance(found["b"], jax.Array)


def test_a_tree_of_orbax(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    state = {"w": jnp.arange(6.0), "layers": [np.arange(3), 2.5], "name": "text", "step": 7}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", state)
    import_weights(tmp_path / "orbax", tmp_path / "one")
    one, other = ckpt.load(tmp_path / "one"), ckpt.load(tmp_path / "orbax")
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert bits(one["w"]) == bits(state["w"])
    assert (one["name"], one["step"], one["layers"][1]) == ("text", 7, 2.5)
    assert ckpt.verify(tmp_path / "one").ok


MIB = 2**20
# All is written by then, and nothing of it is at the target yet.
KILLED = """
import os, signal, sys
import ckpt_core as ckpt  # noqa: E402
def kill(event, arguments):
    if event == "os.rename":
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
ckpt.convert.import_weights(sys.argv[1], sys.argv[2])
"""


@pytest.fixture(name="source", scope="module")
def make_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six arrays of 40 MiB."""
    path = tmp_path_factory.mktemp("source") / "a.npz"
    np.savez(path, **{f"w{n}": np.full(10 * MIB, n, np.float32) for n in range(6)})  # type: ignore[arg-type]
    return path


def test_killed_before_it_is_renamed(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "run" / "a"
    call = [sys.executable, "-c", KILLED, str(source), str(target)]
    assert subprocess.run(call, timeout=120, check=False).returncode == -signal.SIGKILL
    assert not target.exists()
    import_weights(source, target)
    assert ckpt.verify(target).ok
    assert ckpt.load(target, only="w5")["w5"][0] == 5
    assert [name for name in os.listdir(target.parent) if not name.startswith(".")] == ["a"]


def test_memory_is_that_of_a_batch(source: Path, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        import_weights(source, tmp_path / "a")
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < 200 * MIB  # of 240; two arrays at once, and what the database holds


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("hidden", ["a.npz", "a.safetensors", "dcp", "dcp/.metadata"])
def test_a_source_that_is_hidden(tmp_path, monkeypatch, hidden, number):
    np.savez(tmp_path / "a.npz", w=np.ones(2))
    ckpt.save(tmp_path / "a", {"w": np.ones(2)})
    ckpt.convert.export_safetensors(tmp_path / "a", tmp_path / "a.safetensors")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    refuse(monkeypatch, tmp_path / hidden, number, calls=("stat",), below=False)
    with pytest.raises(OSError) as raised:
        import_weights(tmp_path / hidden.removesuffix("/.metadata"), tmp_path / "out")
    assert raised.value.errno == number
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["npz", "safetensors", "folder"])
def test_a_target_that_is_hidden_stays(tmp_path, monkeypatch, kind):
    ckpt.save(tmp_path / "a", {"w": np.ones(2)})
    target = tmp_path / ("out" if kind == "folder" else f"out.{kind}")
    target.mkdir() if kind == "folder" else target.write_text("mine")
    export = ckpt.convert.export_npz if kind == "npz" else ckpt.convert.export_safetensors
    with monkeypatch.context() as patch:
        refuse(patch, target, errno.EIO, calls=("stat", "lstat"), below=False)
        with pytest.raises(OSError) as raised:
            export(tmp_path / "a", target)
    assert raised.value.errno == errno.EIO
    assert kind == "folder" or target.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a", target.name]
