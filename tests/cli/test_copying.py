"""``ckpt cp`` between disk and buckets, and ``ckpt gc``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._storage import KeyValues
from tests.support.command_line import make_call  # noqa: F401 (fixture)
from tests.support.damage import turn_a_bit
from tests.support.stores import keys_at, tree, value_at
from tests.support.stores import make_s3_url as make_s3_url
from tests.support.stores import make_server as make_server
from tests.support.stores import make_store as make_store

pytest.importorskip("typer")
ZSTD = ckpt.Options(compression="zstd")


@pytest.mark.parametrize("options", [None, ZSTD], ids=["plain", "zstd"])
def test_there_and_back(call, store: str, tmp_path: Path, options: Any) -> None:
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


def test_steps_are_copied_once(call, store: str, tmp_path: Path) -> None:
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
    assert code == 2 and "is another save" in err
    assert value_at(f"{store}/1") == 7


def test_damage_is_not_copied(call, store: str, tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", tree(1))
    turn_a_bit(tmp_path / "a")
    code, _, err = call("cp", tmp_path / "a", f"{store}/a")
    assert code == 2 and "was not copied" in err
    assert keys_at(f"{store}/a").list() == []


def test_what_exists_is_left_alone(call, store: str, tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", tree(1))
    ckpt.save(f"{store}/a", tree(2))
    code, _, err = call("cp", tmp_path / "a", f"{store}/a")
    assert code == 2 and "exists already" in err
    assert value_at(f"{store}/a") == 2


def test_a_copy_that_is_interrupted_leaves_nothing(
    call, store: str, tmp_path: Path, monkeypatch: Any
) -> None:
    ckpt.save(tmp_path / "a", tree(1))

    def interrupted(*_: Any) -> bool:
        raise PermissionError("no")

    with monkeypatch.context() as patch:
        patch.setattr(KeyValues, "put_if_unchanged", interrupted)
        assert call("cp", tmp_path / "a", f"{store}/a")[0] == 2
    with pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load(f"{store}/a")
    assert call("cp", tmp_path / "a", f"{store}/b")[0] == 0
    assert value_at(f"{store}/b") == 1


def test_gc_removes_what_dead_writers_left(call, store: str) -> None:
    ckpt.save(f"{store}/1", tree(1))
    keys_at(f"{store}/2").put(".attempt.dead/owner", b"00000000-17-5 1 somebody")
    keys_at(f"{store}/2").put("state/_METADATA", b"")
    keys_at(f"{store}/2").put(".attempt.dead/state/_METADATA", b"{}")
    code, out, _ = call("gc", store)
    assert code == 0 and "2 removed" in out
    assert call("gc", store)[1].strip() == "nothing to remove"
    assert value_at(f"{store}/1") == 1


def test_gc_of_a_directory(call, tmp_path: Path) -> None:
    ckpt.save(tmp_path / "1", tree(1))
    assert call("gc", tmp_path)[1].strip() == "nothing to remove"
