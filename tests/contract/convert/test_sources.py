"""Sources of imports: checkpoints themselves, imports that are interrupted, and what cannot be read."""

import errno
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import import_weights
from tests.support.refusals import refuse
from tests.support.same_bits import bits


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
def test_a_source_that_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str, number: int
) -> None:
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
def test_a_target_that_is_hidden_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
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
