"""What a caller does wrong, or the machine: one clear exception each, nothing else changed.

Every case ends by looking at the whole directory: no file changed and nothing was left behind.
"""

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt


def tree(value=1.0):
    return {"params": {"w": jnp.full((40, 30), value), "b": np.full(3, value)}, "step": int(value)}


def assert_tree(got, value=1.0):
    np.testing.assert_array_equal(got["params"]["w"], np.full((40, 30), value, np.float32))
    np.testing.assert_array_equal(got["params"]["b"], np.full(3, value))
    assert got["step"] == int(value)


def snapshot(directory: Path):
    """Every path below a directory with its bytes; None for directories.

    The note of who saves into a directory of steps is the one file that is no part of a checkpoint.
    """
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if path.name != ".ckpt-owner"
    }


@contextlib.contextmanager
def unchanged(directory: Path):
    """Fails if a file appears, disappears or changes meanwhile."""
    before = snapshot(directory)
    yield
    after = snapshot(directory)
    assert set(after) - set(before) == set(), "left behind"
    assert set(before) - set(after) == set(), "lost"
    assert [name for name in before if before[name] != after[name]] == []


@pytest.fixture
def steps(tmp_path):
    """A directory with the steps 3 and 4."""
    root = tmp_path / "run"
    with ckpt.Checkpointer(root) as checkpointer:
        for step in (3, 4):
            checkpointer.save(step, tree(step))
    return root


def save_and_wait(checkpointer, step, state=None):
    """The error of a save may come at the call or in the background."""
    checkpointer.save(step, tree(step) if state is None else state)
    checkpointer.wait_until_finished()


def assert_usable(root, values=(3, 4)):
    """All steps load, and another one can be saved."""
    with ckpt.Checkpointer(root) as checkpointer:
        assert list(checkpointer.all_steps()) == list(values)
        for value in values:
            assert_tree(checkpointer.load(value), value)
        new = max(values) + 1
        checkpointer.save(new, tree(new))
    assert_tree(ckpt.load(root / str(new)), new)


# ------------------------------------------------------------------------------------ no checkpoint


def test_missing_path(tmp_path):
    with unchanged(tmp_path), pytest.raises(ckpt.CheckpointNotFound) as caught:
        ckpt.load(tmp_path / "no" / "where")
    assert isinstance(caught.value, FileNotFoundError)
    assert str(tmp_path / "no" / "where") in str(caught.value)


@pytest.mark.parametrize(
    "call", [ckpt.load, ckpt.inspect, ckpt.verify], ids=["load", "inspect", "verify"]
)
def test_missing_step_lists_those_that_exist(steps, call):
    with unchanged(steps), pytest.raises(ckpt.CheckpointNotFound) as caught:
        call(steps / "5")
    message = str(caught.value).replace(str(steps), "")
    assert "3" in message
    assert "4" in message


def test_restore_of_a_missing_step(steps):
    target = tree(0)
    with unchanged(steps), pytest.raises(ckpt.CheckpointNotFound, match="4"):
        ckpt.restore(steps / "7", state=target)
    assert_tree(target, 0)


def test_missing_step_of_a_checkpointer(steps):
    with ckpt.Checkpointer(steps) as checkpointer, unchanged(steps):
        for call in (
            checkpointer.load,
            checkpointer.metadata,
            checkpointer.metrics,
            checkpointer.delete,
        ):
            with pytest.raises(ckpt.CheckpointNotFound) as caught:
                call(9)
            message = str(caught.value).replace(str(steps), "")
            assert "9" in message
            assert "3" in message
            assert "4" in message
        with pytest.raises(ckpt.CheckpointNotFound):
            checkpointer.restore(9, state=tree(0))


def test_a_directory_of_steps_is_no_checkpoint(steps):
    with unchanged(steps), pytest.raises(ckpt.CheckpointNotFound) as caught:
        ckpt.load(steps)
    message = str(caught.value).replace(str(steps), "")
    assert "3" in message
    assert "4" in message


def test_missing_item_names_those_that_exist(tmp_path):
    ckpt.save(tmp_path / "c", model=tree(), optimizer={"m": np.ones(1)})
    for call in (
        lambda: ckpt.load(tmp_path / "c", item="modle"),
        lambda: ckpt.restore(tmp_path / "c", modle=tree()),
    ):
        with unchanged(tmp_path), pytest.raises(ckpt.CheckpointNotFound) as caught:
            call()
        assert "modle" in str(caught.value)
        assert "model" in str(caught.value).replace("modle", "")
        assert "optimizer" in str(caught.value)


def test_an_empty_directory_is_no_checkpoint(tmp_path):
    (tmp_path / "c").mkdir()
    with unchanged(tmp_path), pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load(tmp_path / "c")


def test_reading_a_directory_that_does_not_exist(tmp_path):
    """An evaluator may start before the training: it sees no steps, and makes nothing."""
    with unchanged(tmp_path), ckpt.Checkpointer(tmp_path / "run", read_only=True) as checkpointer:
        assert list(checkpointer.all_steps()) == []
        with pytest.raises(ckpt.CheckpointNotFound):
            checkpointer.load(3)


def test_a_fresh_directory_is_a_fresh_start(tmp_path):
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore_latest(state=tree(0)) is None
        assert checkpointer.latest_step() is None
        assert list(checkpointer.all_steps()) == []


# ------------------------------------------------------------------------------------- half-written


def test_a_step_without_its_record(steps):
    """The marker without the record: files that were copied in part, or damage. Never loaded."""
    (steps / "4" / "ckpt.json").unlink()
    with unchanged(steps), pytest.raises(ckpt.CheckpointCorrupt, match=r"ckpt\.json"):
        ckpt.load(steps / "4")
    with ckpt.Checkpointer(steps) as checkpointer:
        with pytest.warns(RuntimeWarning, match="step 4"):
            restored = checkpointer.restore_latest(state=tree(0))
        assert restored.step == 3
        assert_tree(restored["state"], 3)


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("part", ["manifest.ocdbt", "checksums", "ocdbt.process_0"])
def test_a_step_that_was_copied_in_part(steps, part):
    remove(steps / "4" / "state" / part)
    with unchanged(steps), pytest.raises(ckpt.CheckpointCorrupt) as caught:
        ckpt.load(steps / "4")
    assert caught.value.file or caught.value.leaf
    assert not ckpt.verify(steps / "4").ok
    assert_tree(ckpt.load(steps / "3"), 3)


@pytest.mark.parametrize("part", ["state/_METADATA", "state/_sharding", "_CHECKPOINT_METADATA"])
def test_a_step_without_what_only_orbax_reads(steps, part):
    """It loads, for our record says everything; `verify` tells that a file is gone."""
    remove(steps / "4" / part)
    assert_tree(ckpt.load(steps / "4"), 4)
    report = ckpt.verify(steps / "4")
    assert not report.ok
    assert part in {problem.file for problem in report.problems}


def test_a_temporary_directory_is_no_checkpoint(steps):
    """What a killed save left is invisible to everyone."""
    junk = steps / ".ckpt-tmp.5.nobody-1-1.abcdef"
    shutil.copytree(steps / "4", junk)
    (junk / "ckpt.json").unlink()
    with unchanged(steps):
        with pytest.raises(ckpt.CheckpointError):
            ckpt.load(junk)
        with pytest.raises(ckpt.CheckpointNotFound) as caught:
            ckpt.load(steps / "5")
        assert "nobody" not in str(caught.value)
        with ckpt.Checkpointer(steps, read_only=True) as checkpointer:
            assert list(checkpointer.all_steps()) == [3, 4]
    assert_usable(steps)


# ----------------------------------------------------------------------------------------- existing


@pytest.mark.parametrize("save", [ckpt.save, lambda *a, **kw: ckpt.save_async(*a, **kw).result()],
                         ids=["save", "save_async"])  # fmt: skip
def test_existing_checkpoint(tmp_path, save):
    save(tmp_path / "c", tree(1))
    with unchanged(tmp_path), pytest.raises(ckpt.CheckpointExists) as caught:
        save(tmp_path / "c", tree(2))
    assert isinstance(caught.value, FileExistsError)
    assert "overwrite" in str(caught.value)
    save(tmp_path / "c", tree(3), overwrite=True)
    assert_tree(ckpt.load(tmp_path / "c"), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_existing_step(steps):
    with (
        ckpt.Checkpointer(steps) as checkpointer,
        unchanged(steps),
        pytest.raises(ckpt.CheckpointExists, match="4"),
    ):
        save_and_wait(checkpointer, 4)
    assert_usable(steps)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_something_else(tmp_path, overwrite):
    """Overwriting is for checkpoints: somebody's home directory is not deleted."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_text("years of work")
    with unchanged(tmp_path), pytest.raises(ckpt.CheckpointExists):
        ckpt.save(tmp_path / "c", tree(), overwrite=overwrite)


@pytest.mark.parametrize("inside", ["other", "state/inner", "state"])
def test_saving_inside_a_checkpoint(tmp_path, inside):
    """It would not be the checkpoint any more that it was when it was sealed."""
    ckpt.save(tmp_path / "c", tree(1))
    for overwrite in (False, True):
        with unchanged(tmp_path), pytest.raises((ckpt.CheckpointError, ValueError)):
            ckpt.save(tmp_path / "c" / inside, tree(2), overwrite=overwrite)
    assert ckpt.verify(tmp_path / "c").ok


def test_overwriting_with_what_cannot_be_saved(tmp_path):
    ckpt.save(tmp_path / "c", tree(1))
    with unchanged(tmp_path), pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.save(tmp_path / "c", {"x": {1, 2}}, overwrite=True)
    assert_tree(ckpt.load(tmp_path / "c"), 1)


# --------------------------------------------------------------- a file where a directory should be


def test_saving_onto_a_file(tmp_path):
    (tmp_path / "c").write_text("text")
    for overwrite in (False, True):
        with unchanged(tmp_path), pytest.raises(ckpt.CheckpointExists) as caught:
            ckpt.save(tmp_path / "c", tree(), overwrite=overwrite)
        assert str(tmp_path / "c") in str(caught.value)


def test_saving_below_a_file(tmp_path):
    (tmp_path / "file").write_text("text")
    with unchanged(tmp_path), pytest.raises((ckpt.CheckpointError, NotADirectoryError)) as caught:
        ckpt.save(tmp_path / "file" / "c", tree())
    assert str(tmp_path / "file") in str(caught.value)


def test_loading_a_file(tmp_path):
    (tmp_path / "c").write_text("text")
    for path in (tmp_path / "c", tmp_path / "c" / "below"):
        for call in (ckpt.load, ckpt.inspect, ckpt.verify):
            with unchanged(tmp_path), pytest.raises(ckpt.CheckpointNotFound) as caught:
                call(path)
            assert str(tmp_path / "c") in str(caught.value)


def test_a_checkpointer_on_a_file(tmp_path):
    (tmp_path / "c").write_text("text")
    with unchanged(tmp_path), pytest.raises((ckpt.CheckpointError, NotADirectoryError)) as caught:
        ckpt.Checkpointer(tmp_path / "c").save(0, tree())
    assert str(tmp_path / "c") in str(caught.value)


def test_a_file_among_the_steps(steps):
    (steps / "5").write_text("not a step")
    with ckpt.Checkpointer(steps) as checkpointer:
        assert list(checkpointer.all_steps()) == [3, 4]
        assert checkpointer.latest_step() == 4
        with unchanged(steps), pytest.raises(ckpt.CheckpointExists):
            save_and_wait(checkpointer, 5)


# ------------------------------------------------------------------- what cannot be saved or loaded


@pytest.mark.parametrize("asynchronous", [True, False])
def test_unsaveable_leaf(steps, asynchronous):
    with ckpt.Checkpointer(steps, asynchronous=asynchronous) as checkpointer, unchanged(steps):
        with pytest.raises(ckpt.UnsupportedLeaf) as caught:
            checkpointer.save(5, {"good": jnp.ones(2), "bad": {"f": len}})
        assert isinstance(caught.value, TypeError)
        assert "bad/f" in str(caught.value)
        assert "builtin_function_or_method" in str(caught.value)
    assert_usable(steps)


def test_mismatched_tree(steps):
    target = tree(0)
    target["params"]["weight"] = target["params"].pop("w")
    for call in (
        lambda: ckpt.load(steps / "4", target),
        lambda: ckpt.restore(steps / "4", state=target),
    ):
        with unchanged(steps), pytest.raises(ckpt.StructureMismatch) as caught:
            call()
        assert {(one.path, one.kind) for one in caught.value.mismatches} == {
            ("params/weight", "missing"),
            ("params/w", "unexpected"),
        }
    np.testing.assert_array_equal(target["params"]["b"], np.zeros(3))


def test_restore_latest_raises_on_a_mismatch(steps):
    """The code is wrong, not the disk: no older step is tried."""
    with (
        ckpt.Checkpointer(steps) as checkpointer,
        unchanged(steps),
        pytest.raises(ckpt.StructureMismatch),
    ):
        checkpointer.restore_latest(state={"params": {"w": jnp.ones((40, 40))}})


def test_restore_latest_never_starts_afresh_over_damage(steps):
    """With every candidate damaged it raises; a None would train from scratch in silence."""
    for step in (3, 4):
        for path in (steps / str(step)).rglob("d/*"):
            path.write_bytes(bytes(path.stat().st_size))
    with (
        ckpt.Checkpointer(steps) as checkpointer,
        unchanged(steps),
        pytest.warns(RuntimeWarning, match="damaged"),
        pytest.raises(ckpt.CheckpointCorrupt),
    ):
        checkpointer.restore_latest(state=tree(0))


# ---------------------------------------------------------------------------------------- full disk


def mount(directory: Path, size: str):
    """A small file system in memory on `directory`; skips where this user cannot make one."""
    directory.mkdir(exist_ok=True)
    command = shutil.which("mount")
    if os.geteuid() != 0 or command is None:
        pytest.skip("needs root for a small file system")
    done = subprocess.run(
        [command, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    directory = tmp_path / "disk"
    mount(directory, "4m")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True, timeout=30)


def used_bytes(directory):
    status = os.statvfs(directory)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def too_large():
    """Far more than fits, in many leaves of both sizes."""
    random = np.random.default_rng(0)
    small = {f"s{i}": random.integers(0, 255, 1000, dtype=np.uint8) for i in range(200)}
    return small | {f"l{i}": random.standard_normal(2**17) for i in range(12)}


@pytest.mark.parametrize("kind", ["large", "small"])
def test_full_disk(small_disk, kind):
    root = small_disk / "run"
    with ckpt.Checkpointer(root, asynchronous=False) as checkpointer:
        checkpointer.save(1, tree(1))
    state = too_large()
    if kind == "small":  # below the size of a chunk that is written by itself
        state = {f"s{i}": np.full(4096, i % 251, np.uint8) for i in range(1500)}
    before = used_bytes(small_disk)
    with (
        ckpt.Checkpointer(root, asynchronous=False) as checkpointer,
        unchanged(small_disk),
        pytest.raises(OSError) as caught,
    ):
        checkpointer.save(2, state)
    assert caught.value.errno == errno.ENOSPC
    assert used_bytes(small_disk) <= before + 64 * 1024, "a failed save gives its room back"
    with unchanged(small_disk), pytest.raises(OSError) as caught:
        ckpt.save(small_disk / "free", state)
    assert caught.value.errno == errno.ENOSPC
    assert_usable(root, (1,))


def test_full_disk_in_the_background(small_disk):
    root = small_disk / "run"
    checkpointer = ckpt.Checkpointer(root)
    checkpointer.save(1, tree(1))
    checkpointer.wait_until_finished()
    with unchanged(small_disk):
        checkpointer.save(2, too_large())
        with pytest.raises(OSError) as caught:
            checkpointer.wait_until_finished()
        assert caught.value.errno == errno.ENOSPC
        assert list(checkpointer.all_steps()) == [1]
        checkpointer.wait_until_finished()  # raised once
    checkpointer.save(3, tree(3))
    checkpointer.close()
    assert_tree(ckpt.load(root / "3"), 3)


@pytest.mark.parametrize("free", [0, 4, 12, 24])
def test_disk_full_to_the_last_page(small_disk, free):
    """The room ends anywhere: at the data, the metadata or the record."""
    root = small_disk / "run"
    with ckpt.Checkpointer(root, asynchronous=False) as checkpointer:
        checkpointer.save(1, tree(1))
    filler = small_disk / "filler"
    status = os.statvfs(small_disk)
    filler.write_bytes(bytes((status.f_bfree - free) * status.f_frsize))
    before = snapshot(root)
    saved = True
    try:
        ckpt.save(root / "2", tree(2))
    except OSError as error:
        assert error.errno == errno.ENOSPC  # noqa: PT017 - it may also fit
        saved = False
    filler.unlink()
    if saved:
        assert_tree(ckpt.load(root / "2"), 2)
    else:
        assert snapshot(root) == before
        assert_usable(root, (1,))


def test_overwriting_on_a_full_disk_keeps_the_old(small_disk):
    ckpt.save(small_disk / "c", tree(1))
    with unchanged(small_disk), pytest.raises(OSError):
        ckpt.save(small_disk / "c", too_large(), overwrite=True)
    assert_tree(ckpt.load(small_disk / "c"), 1)


# ------------------------------------------------------------------------------ read-only directory


@pytest.fixture
def read_only_directory(tmp_path):
    """A directory with step 1 that nobody can write, root included."""
    directory = tmp_path / "disk"
    if os.geteuid() == 0:
        mount(directory, "4m")
        ckpt.save(directory / "run" / "1", tree(1))
        subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True, timeout=30)
        yield directory / "run"
        subprocess.run(["umount", "-l", str(directory)], check=True, timeout=30)
    else:
        ckpt.save(directory / "run" / "1", tree(1))
        (directory / "run").chmod(0o555)
        yield directory / "run"
        (directory / "run").chmod(0o755)


def save_there(root, asynchronous):
    """Opening, saving or closing may find out first."""
    with ckpt.Checkpointer(root, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(2, tree(2))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_read_only_directory(read_only_directory, asynchronous):
    root = read_only_directory
    with unchanged(root):
        with pytest.raises(OSError) as caught:
            ckpt.save(root / "2", tree(2))
        assert caught.value.errno in (errno.EROFS, errno.EACCES)
        with pytest.raises(OSError) as caught:
            save_there(root, asynchronous)
        assert caught.value.errno in (errno.EROFS, errno.EACCES)
        # Reading needs no writing.
        assert_tree(ckpt.load(root / "1"), 1)
        assert ckpt.verify(root / "1").ok
        with ckpt.Checkpointer(root, read_only=True) as checkpointer:
            assert checkpointer.restore_latest(state=tree(0)).step == 1


def test_saving_with_a_read_only_checkpointer(steps):
    with unchanged(steps), ckpt.Checkpointer(steps, read_only=True) as checkpointer:
        for call in (
            lambda: checkpointer.save(5, tree(5)),
            lambda: checkpointer.delete(3),
            lambda: checkpointer.rollback_to(3),
        ):
            with pytest.raises(
                (ckpt.CheckpointError, ValueError, RuntimeError, OSError), match="read"
            ):
                call()


# ---------------------------------------------------------------------------------- wrong arguments


def test_state_and_items_together(tmp_path):
    with unchanged(tmp_path):
        for call in (
            lambda: ckpt.save(tmp_path / "c", tree(), model=tree()),
            lambda: ckpt.save(tmp_path / "c", tree(), items={"model": tree()}),
            lambda: ckpt.save(tmp_path / "c"),
            lambda: ckpt.save(tmp_path / "c", items={}),
        ):
            with pytest.raises(TypeError):
                call()


@pytest.mark.parametrize("name", ["overwite", "metdata", "option", "overwrites"])
def test_an_item_named_almost_like_an_argument(tmp_path, name):
    """Or `overwite=True` would be saved as an item, and the typo found years later."""
    with unchanged(tmp_path), pytest.raises(TypeError, match=name):
        ckpt.save(tmp_path / "c", model=tree(), **{name: True})
    ckpt.save(tmp_path / "c", items={"model": tree(), name: {"x": 1}})
    assert ckpt.load(tmp_path / "c", item=name) == {"x": 1}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", ".hidden", "metrics.tree", "ckpt.json",
                                  "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt",
                                  "a\x00b", "x.orbax-checkpoint-tmp"])  # fmt: skip
def test_impossible_item_names(tmp_path, name):
    with unchanged(tmp_path), pytest.raises((ckpt.CheckpointError, ValueError, TypeError)):
        ckpt.save(tmp_path / "c", items={name: tree()})


@pytest.mark.parametrize(
    "metrics", [{"loss": "0.5"}, {"loss": None}, {"loss": [1]}, {1: 0.5}, "loss", 0.5]
)
def test_metrics_are_numbers(tmp_path, metrics):
    with (
        ckpt.Checkpointer(tmp_path / "run") as checkpointer,
        unchanged(tmp_path / "run"),
        pytest.raises(TypeError, match=r"items|number"),
    ):
        checkpointer.save(1, tree(), metrics=metrics)


def test_metrics_may_be_arrays_of_one_number(tmp_path):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, tree(), metrics={"a": jnp.float32(0.5), "b": np.float64(1), "c": 2})
        checkpointer.wait_until_finished()
        assert checkpointer.metrics(1) == {"a": 0.5, "b": 1.0, "c": 2}


@pytest.mark.parametrize("step", [-1, 1.5, "1", None, True])
def test_impossible_steps(tmp_path, step):
    with (
        ckpt.Checkpointer(tmp_path / "run") as checkpointer,
        unchanged(tmp_path / "run"),
        pytest.raises((TypeError, ValueError)),
    ):
        checkpointer.save(step, tree())


def test_a_step_may_be_an_integer_of_numpy_or_jax(tmp_path):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(np.int64(1), tree(1))
        checkpointer.save(jnp.int32(2), tree(2))
        assert_tree(checkpointer.load(np.int32(1)), 1)
    assert_tree(ckpt.load(tmp_path / "2"), 2)


@pytest.mark.parametrize("path", ["", None, 5, b"bytes"])
def test_impossible_paths(path):
    for call in (lambda: ckpt.load(path), lambda: ckpt.save(path, tree())):
        with pytest.raises((TypeError, ValueError, ckpt.CheckpointError)):
            call()


def test_metadata_must_be_json(tmp_path):
    for metadata in ({"x": object()}, {"x": np.ones(2)}, {"x": {1, 2}}):
        with unchanged(tmp_path), pytest.raises((TypeError, ValueError)):
            ckpt.save(tmp_path / "c", tree(), metadata=metadata)


@pytest.mark.parametrize(
    "settings",
    [
        {"best_metric": "loss"},
        {"best_metric": "loss", "best_mode": "least"},
        {"best_mode": "min"},
        {"max_to_keep": 2, "keep_policy": ckpt.keep.latest(3)},
        {"save_interval_steps": 2, "save_policy": ckpt.when.every_steps(3)},
        {"max_to_keep": 0},
        {"max_to_keep": -1},
        {"save_interval_steps": 0},
        {"keep_period": 0},
        {"step_format_fixed_length": 0},
        {"max_to_kep": 3},
    ],
    ids=str,
)
def test_impossible_settings(tmp_path, settings):
    with unchanged(tmp_path), pytest.raises((TypeError, ValueError)):
        ckpt.Checkpointer(tmp_path / "run", **settings)


@pytest.mark.parametrize("options", [{"durable": False}, False, "fast"])
def test_options_of_the_wrong_type(tmp_path, options):
    ckpt.save(tmp_path / "c", tree())
    for call in (
        lambda: ckpt.save(tmp_path / "d", tree(), options=options),
        lambda: ckpt.load(tmp_path / "c", options=options),
        lambda: ckpt.Checkpointer(tmp_path / "run", options=options),
    ):
        with unchanged(tmp_path), pytest.raises(TypeError, match=r"[Oo]ptions"):
            call()


def test_relative_and_home_paths_are_resolved_at_the_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    pending = ckpt.save_async("relative/c", tree(1))
    checkpointer = ckpt.Checkpointer("relative/run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    pending.result()
    checkpointer.save(1, tree(1))
    checkpointer.close()
    assert_tree(ckpt.load(tmp_path / "relative" / "c"), 1)
    assert_tree(ckpt.load(tmp_path / "relative" / "run" / "1"), 1)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ckpt.save("~/c", tree(2))
    assert_tree(ckpt.load("~/c"), 2)
    assert (tmp_path / "home" / "c").is_dir()


def test_a_path_may_be_text_or_pathlike(tmp_path):
    ckpt.save(str(tmp_path / "c"), tree(1))
    assert_tree(ckpt.load(str(tmp_path / "c") + "/"), 1)
    assert_tree(ckpt.load(tmp_path / "." / "c"), 1)


@pytest.mark.parametrize(
    "name", ["with space", "ünï", "percent%20", "quote'\"", "hash#", "q?x", "*"]
)
def test_odd_directory_names(tmp_path, name):
    ckpt.save(tmp_path / name, tree(1))
    assert_tree(ckpt.load(tmp_path / name), 1)
    assert_tree(ckpt.load(tmp_path / name, jax.tree.map(lambda x: x, tree(0))), 1)
    assert ckpt.verify(tmp_path / name).ok


def test_a_symbolic_link_to_a_checkpoint(tmp_path):
    ckpt.save(tmp_path / "real" / "3", tree(3))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "best").symlink_to(tmp_path / "real" / "3")
    assert_tree(ckpt.load(tmp_path / "best"), 3)
    with ckpt.Checkpointer(tmp_path / "link") as checkpointer:
        assert list(checkpointer.all_steps()) == [3]
        checkpointer.save(4, tree(4))
    assert_tree(ckpt.load(tmp_path / "real" / "4"), 4)


# ---- names that something else reads in another way --------------------------------------------

BACKSLASH = [
    lambda root: ckpt.save(f"{root}/a\\b", {"w": np.arange(3)}),
    lambda root: ckpt.save(f"{root}/a\\b/c", {"w": np.arange(3)}),
    lambda root: ckpt.save_async(f"{root}/a\\", {"w": np.arange(3)}),
    lambda root: ckpt.Checkpointer(f"{root}/a\\b"),
    lambda root: ckpt.Checkpointer(root, step_prefix="a\\b"),
    lambda root: ckpt.Checkpointer(root, local_directory=f"{root}/a\\b"),
    lambda root: ckpt.save(f"{root}/c", items={"a\\b": {"w": np.arange(3)}}),
]


@pytest.mark.parametrize("call", BACKSLASH)
def test_backslashes_are_refused_before_anything_is_written(tmp_path, call):
    """TensorStore takes them for slashes: arrays were written into other directories, and never found."""
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(ValueError, match=r"backslash|step_prefix|name of an item"):
        call(str(root))
    assert not [path for path in root.rglob("*") if "ckpt-owner" not in path.name]


@pytest.mark.parametrize("name", ["\ud800", "a\nb", "é" * 128, "x" * 201, "a\tb"])
def test_item_names_that_no_file_can_have(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be the name of an item"):
        ckpt.save(tmp_path / "one", items={name: {"w": np.arange(3)}})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("prefix", ["a\nb", "a/b", ".a", "é" * 128])
def test_step_prefixes_that_would_hide_steps(tmp_path, prefix):
    """With a line break in it, acknowledged steps were not listed, and training began anew."""
    with pytest.raises(ValueError, match="step_prefix"):
        ckpt.Checkpointer(tmp_path / "run", step_prefix=prefix)


def test_a_directory_called_as_the_record_is_none(tmp_path):
    ckpt.save(tmp_path / "ckpt.json", {"w": np.arange(3)})
    ckpt.save(tmp_path / "ckpt.json", {"w": np.arange(3)}, overwrite=True)
    ckpt.save(tmp_path / "other", {"w": np.arange(3)})
    assert ckpt.verify(tmp_path / "ckpt.json").ok
