"""``ckpt cp`` between disk and buckets, and ``ckpt gc``."""

import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import children, seams
from tests.support.damage import turn_a_bit
from tests.support.stores import keys_at, tree, value_at

pytest.importorskip("typer")
ZSTD = ckpt.Options(compression="zstd")


@pytest.mark.parametrize("options", [None, ZSTD], ids=["plain", "zstd"])
def test_there_and_back(call, store, tmp_path, options):
    ckpt.save(tmp_path / "a", tree(1), options=options, metadata={"note": "[x]"})
    for source, target in [
        (tmp_path / "a", f"{store}/b"),
        (f"{store}/b", f"{store}/c"),
        (f"{store}/c", tmp_path / "d"),
        (tmp_path / "d", tmp_path / "e"),
    ]:
        code, out, err = call("cp", source, target)
        assert (code, err) == (0, "") and "->" in out
        assert value_at(str(target)) == 1
        assert ckpt.verify(target).ok
        assert ckpt.inspect(target).metadata == {"note": "[x]"}
    names = {file.relative_to(tmp_path / "a") for file in (tmp_path / "a").rglob("*")}
    assert {file.relative_to(tmp_path / "e") for file in (tmp_path / "e").rglob("*")} == names
    # what was copied can be replaced and deleted like any other
    ckpt.save(f"{store}/b", tree(2), overwrite=True)
    assert value_at(f"{store}/b") == 2 and ckpt.verify(f"{store}/b").ok
    ckpt.save(f"{store}/fresh", tree(2))
    assert len(keys_at(f"{store}/b").list()) == len(keys_at(f"{store}/fresh").list())


def test_steps_are_copied_once(call, store, tmp_path):
    with ckpt.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        for step in range(3):
            checkpointer.save(step, tree(step))
    assert call("cp", tmp_path / "run", store, "--step", "1")[0] == 0
    code, out, _ = call("cp", tmp_path / "run", store)
    assert code == 0 and out.count("->") == 2 and "is there already" in out
    with ckpt.Checkpointer(store) as checkpointer:
        assert checkpointer.all_steps() == [0, 1, 2]
        assert checkpointer.restore_latest(tree(9)).state["n"] == 2
        checkpointer.delete(1)
        assert checkpointer.save(3, tree(3))
    ckpt.save(f"{store}/1", tree(7))
    code, _, err = call("cp", tmp_path / "run", store)
    assert code == 2 and "another save" in err
    assert value_at(f"{store}/1") == 7


def test_damage_is_not_copied(call, store, tmp_path):
    ckpt.save(tmp_path / "a", tree(1))
    turn_a_bit(tmp_path / "a")
    code, _, err = call("cp", tmp_path / "a", f"{store}/a")
    assert code == 2 and "was not copied" in err
    assert keys_at(f"{store}/a").list() == []


KILLED_COPY = """
import os, signal, sys
from tests.support import seams
from ckpt_core.cli import main
seams.at(None, "commit", before=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
sys.argv = ["ckpt", "cp", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_a_copy_that_fails_or_is_killed_is_not_in_the_way_of_the_next(
    call, tmp_path, store, monkeypatch, kind
):
    frozen = jnp.ones(1 << 18)  # which the second step shares with the first
    with ckpt.Checkpointer(tmp_path / "run", asynchronous=False) as run:
        for step in (0, 1):
            run.save(step, tree(step) | {"frozen": frozen})
    source, target = tmp_path / "run/1", str(tmp_path / "b") if kind == "disk" else f"{store}/b"
    assert any(source.rglob("ocdbt.linked"))
    with monkeypatch.context() as patch:
        seams.at(patch, "commit", before=seams.fail())
        assert call("cp", source, target)[0] == 2
    assert kind == "disk" or keys_at(target).list() == []
    command = [sys.executable, "-c", KILLED_COPY, str(source), target]
    done = subprocess.run(command, env=children.environment(), timeout=150, check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load(target)
    assert call("cp", source, target)[0] == 0
    assert ckpt.load(target)["n"] == 1 and ckpt.verify(target).ok


def test_large_data_files_and_odd_names(call, store, tmp_path):
    """Of a data file above 32 MiB a record on a disk has the digest of a part."""
    items = {"big": {"w": np.arange(5_000_000.0)}, "a%41": {"w": np.ones(3000)}, "b#?": None}
    ckpt.save(tmp_path / "a", items=items)
    ckpt.save(f"{store}/x%41", items=items)
    for source, target in [
        (tmp_path / "a", f"{store}/b"),
        (f"{store}/b", tmp_path / "c"),
        (f"{store}/x%41", tmp_path / "d"),
    ]:
        code, _, err = call("cp", source, target)
        assert (code, err) == (0, "")
        assert ckpt.verify(target).ok
        loaded = ckpt.load(target)
        assert loaded["big"]["w"][-1] == 4_999_999 and loaded["a%41"]["w"].sum() == 3000
    keys = keys_at(f"{store}/b")
    large = max(keys.list(), key=lambda key: len(keys.get(key) or b""))
    data = keys.get(large) or b""
    keys.put(large, data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    assert not ckpt.verify(f"{store}/b").ok


def test_a_run_is_copied_with_what_is_said_of_it(call, tmp_path):
    with ckpt.Checkpointer(tmp_path / "run") as run:
        run.save(0, tree(0))
        run.write_run_metadata({"lr": 0.1})
    for _ in range(2):
        code, _, err = call("cp", tmp_path / "run", tmp_path / "copy")
        assert (code, err) == (0, "")
    with ckpt.Checkpointer(tmp_path / "copy", read_only=True) as copy:
        assert copy.run_metadata == {"lr": 0.1} and copy.all_steps() == [0]
    with ckpt.Checkpointer(tmp_path / "run") as run:
        restored = run.restore_latest(tree(0))
        assert restored is not None and restored["state"]
        run.save(1, tree(1))
        run.write_run_metadata({"lr": 0.2})
    code, out, _ = call("cp", tmp_path / "run", tmp_path / "copy")
    assert code == 0 and "has other metadata of the run, which stays" in out
    with ckpt.Checkpointer(tmp_path / "copy", read_only=True) as copy:
        assert copy.run_metadata == {"lr": 0.1} and copy.all_steps() == [0, 1]
