"""Folders of other people, and folders that cannot be listed."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.command_line import make_call  # noqa: F401 (fixture)
from tests.support.refusals import refuse
from tests.support.stores import keys_at, tree, value_at

NAMES = ["ckpt.json", "_CHECKPOINT_METADATA", "_METADATA", "orbax.checkpoint", "commit_success.txt"]
CONTENTS = [b"", b"{}", b'{"mine": [1]}', b"notes of mine\n", b'{"crc32c":"notes"}', b"\xff\xfe"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_on_a_disk(call, tmp_path, name, content, overwrite):
    folder = tmp_path / "work"
    (folder / "years").mkdir(parents=True)
    (folder / name).write_bytes(content)
    (folder / "years" / "of.txt").write_bytes(b"labour")
    for save in (
        lambda: ckpt.save(folder, tree(1), overwrite=overwrite),
        lambda: ckpt.save_async(folder, tree(1), overwrite=overwrite).result(),
    ):
        with pytest.raises(
            ckpt.CheckpointExists, match=f"holds no checkpoint .* whose {name} is another file"
        ):
            save()
    with (
        pytest.raises(ckpt.CheckpointExists, match="holds no checkpoint"),
        ckpt.writer(folder, overwrite=overwrite),
    ):
        pass
    pytest.importorskip("typer")
    code, _, err = call("rm", folder, "--yes")
    assert code == 2 and "is no checkpoint" in err
    assert (folder / "years" / "of.txt").read_bytes() == b"labour"
    assert (folder / name).read_bytes() == content
    assert os.listdir(tmp_path) == ["work"]


@pytest.mark.parametrize("name", ["a folder", "a pipe", "a link that leads nowhere"])
def test_what_is_no_file(tmp_path, name):
    folder = tmp_path / "work"
    folder.mkdir()
    match name:
        case "a folder":
            (folder / "ckpt.json").mkdir()
        case "a pipe":
            os.mkfifo(folder / "ckpt.json")
        case _:
            (folder / "ckpt.json").symlink_to(tmp_path / "nothing")
    with pytest.raises(ckpt.CheckpointExists, match="holds no checkpoint"):
        ckpt.save(folder, tree(1), overwrite=True)
    assert os.listdir(folder) == ["ckpt.json"]


@pytest.mark.parametrize("name", ["ckpt.json", "_METADATA", "commit_success.txt"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_keys_in_a_bucket(store, name, overwrite):
    mine = keys_at(f"{store}/work")
    mine.put(name, b"notes of mine")
    mine.put("years/of.txt", b"labour")
    with pytest.raises(ckpt.CheckpointExists, match=f"holds no checkpoint .* whose {name} is"):
        ckpt.save(f"{store}/work", tree(1), overwrite=overwrite)
    assert mine.get("years/of.txt") == b"labour" and mine.get(name) == b"notes of mine"


@pytest.mark.parametrize(
    "damage", ["ckpt.json", "empty ckpt.json", "_CHECKPOINT_METADATA", "no ckpt.json"]
)
def test_a_damaged_checkpoint_is_replaced(tmp_path, damage):
    path = tmp_path / "a"
    ckpt.save(path, tree(1))
    name = damage.rpartition(" ")[2]
    data = (path / name).read_bytes()
    (path / name).write_bytes(b"" if "empty" in damage else b"\0" * len(data))
    if damage.startswith("no"):
        (path / name).unlink()
    ckpt.save(path, tree(2), overwrite=True)
    assert value_at(str(path)) == 2


def test_what_orbax_wrote_is_replaced(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"w": np.ones(2)})
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "b", {"w": np.ones(2)})
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": np.ones(2)}))
        manager.wait_until_finished()
    for path in (tmp_path / "a", tmp_path / "b", tmp_path / "run" / "3"):
        ckpt.save(path, tree(2), overwrite=True)
        assert value_at(str(path)) == 2


STATE = {"a": np.arange(5000.0), "b": {"c": np.arange(3)}}
MOST = 200


def check(path: Path, n: int) -> None:
    loaded = ckpt.load(path)
    np.testing.assert_array_equal(loaded["a"], STATE["a"] + n)
    assert ckpt.verify(path).ok


def state(n: int) -> dict[str, Any]:
    return {"a": STATE["a"] + n, "b": STATE["b"]}


@pytest.mark.parametrize("name", ["scandir", "listdir", "lstat", "stat"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_a_listing_that_fails_loses_nothing(tmp_path, monkeypatch, name, number):
    """At every call of a save that replaces a checkpoint: one of the two is there, whole."""
    path = tmp_path / "run"
    ckpt.save(path, state(0))
    told = 0
    for at in range(1, MOST):
        new = at
        with monkeypatch.context() as patch:
            looks = refuse(patch, tmp_path, number, (name,), times=1, first=at - 1)
            try:
                ckpt.save(path, state(new), overwrite=True)
            except (OSError, ckpt.CheckpointError):
                told += 1
                new = -1
        if len(looks) < at:
            break
        assert ckpt.verify(path).ok, (name, at)
        kept = int(ckpt.load(path)["a"][0])
        assert kept in ({at} if new == at else {at, at - 1}), (name, at)
        ckpt.save(path, state(at), overwrite=True)
    else:
        raise AssertionError("there is no end to the calls")
    if name == "scandir":
        assert told > 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_the_step_before_stays(tmp_path, monkeypatch, number):
    for at in range(1, MOST):
        run = tmp_path / str(at)
        with ckpt.Checkpointer(run, max_to_keep=1, asynchronous=False) as checkpointer:
            checkpointer.save(0, state(0))
            with monkeypatch.context() as patch, contextlib.suppress(OSError):
                looks = refuse(patch, tmp_path, number, ("scandir",), times=1, first=at - 1)
                checkpointer.save(1, state(1))
            newest = checkpointer.all_steps()[-1]
        check(run / str(newest), newest)
        if len(looks) < at:
            return
    raise AssertionError("there is no end to the calls")
