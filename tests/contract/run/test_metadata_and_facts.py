"""What a directory says of a run and of its steps, by whatever name it is called: metadata, durations, versions."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.takeovers import make_directory  # noqa: F401 (fixtures)

STATE = {"w": np.ones(4)}


def test_run_metadata(directory):
    with ckpt.Checkpointer(directory) as checkpointer:
        assert checkpointer.run_metadata is None
        checkpointer.write_run_metadata({"config": {"width": 8}, "seed": 3})
        checkpointer.save(1, STATE)
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [1]
        checkpointer.write_run_metadata({"config": {"width": 16}})
    with ckpt.Checkpointer(directory, read_only=True) as follower:
        assert follower.run_metadata == {"config": {"width": 16}}
        assert follower.inspect(1).run_metadata == {"config": {"width": 16}}
        with pytest.raises(ckpt.CheckpointError, match="read_only"):
            follower.write_run_metadata({})
    assert ckpt.inspect(f"{directory}/1").run_metadata == {"config": {"width": 16}}


@pytest.mark.parametrize("value", [{"a": object()}, [1], None, "text", {"a": {1j: 2}}])
def test_run_metadata_refused(tmp_path, value):
    with (
        ckpt.Checkpointer(tmp_path) as checkpointer,
        pytest.raises(TypeError, match="JSON"),
    ):
        checkpointer.write_run_metadata(value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xff"])
def test_damaged_run_metadata(tmp_path, data):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.write_run_metadata({"a": 1})
        (tmp_path / "metadata" / "_ROOT_METADATA").write_bytes(data)
        with pytest.raises(ckpt.CheckpointCorrupt, match="_ROOT_METADATA"):
            _ = checkpointer.run_metadata


def test_orbax_reads_run_metadata_and_we_read_its(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ckpt.Checkpointer(tmp_path / "ours") as checkpointer:
        checkpointer.write_run_metadata({"width": 8})
        checkpointer.save(1, STATE)
    with ocp.CheckpointManager(tmp_path / "ours") as manager:
        assert manager.metadata().custom_metadata == {"width": 8}
        assert manager.all_steps() == [1]
    with ocp.CheckpointManager(tmp_path / "theirs", metadata={"width": 9}) as manager:
        manager.wait_until_finished()
    assert ckpt.Checkpointer(tmp_path / "theirs", read_only=True).run_metadata == {"width": 9}


@pytest.mark.parametrize(
    ("data", "wanted"),
    [(b'{"seed": 3}', {"seed": 3}), (b"notes of mine", None), (b"[1]", None)],
    ids=["of Orbax", "of somebody else", "a list"],
)
def test_metadata_of_an_early_orbax(tmp_path, data, wanted):
    """Until November 2024 its file held the value itself; whatever else has that name is nobody's."""
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "metadata").write_bytes(data)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.run_metadata == wanted
        checkpointer.write_run_metadata({"seed": 4})
        assert checkpointer.run_metadata == {"seed": 4}
    assert (tmp_path / "metadata" / "metadata").read_bytes() == data


def test_facts_of_a_step(directory):
    with ckpt.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, STATE, metrics={"loss": 0.5}, metadata={"note": "x"})
        checkpointer.wait_until_finished()
        info = checkpointer.inspect(1)
    assert info.metadata == {"note": "x"}
    assert info.metrics == {"loss": 0.5}
    assert {"python", "jax", "numpy", "tensorstore", "ckpt-core"} <= set(info.versions)
    assert info.created_unix_secs is not None
    assert set(info.durations) == {"snapshot_secs", "write_secs"}
    assert all(0 < secs < 60 for secs in info.durations.values())
    assert info.run_metadata is None


OPTIONS = ckpt.Options(persist_policy=ckpt.when.every_steps(1000), durable=False)


@pytest.fixture
def names(tmp_path: Path) -> list[Path]:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    return [tmp_path / "link" / "run", tmp_path / "real" / "run"]


def train(directory: Path, fast: Path, steps: int) -> int | None:
    """Goes on for some steps; the step that it began from."""
    with ckpt.Checkpointer(directory, local_directory=fast, options=OPTIONS) as run:
        restored = run.restore_latest(state={"n": 0})
        first = 0 if restored is None else restored.step + 1
        assert restored is None or restored["state"] == {"n": restored.step}
        for step in range(first, first + steps):
            assert run.save(step, {"n": step})
    return None if restored is None else restored.step


def test_both_names_go_on_from_the_newest_step(names, tmp_path):
    link, real = names
    fast = tmp_path / "fast"
    assert train(link, fast, 3) is None
    assert train(real, fast, 2) == 2
    assert train(link, fast, 1) == 4
    assert len(list(fast.glob("run-*"))) == 1


def test_a_copy_is_another_run(names, tmp_path, caplog):
    link, real = names
    train(link, tmp_path / "fast", 3)
    shutil.copytree(real, tmp_path / "copy")
    assert train(tmp_path / "copy", tmp_path / "fast", 1) == 0
    assert "do not count" not in caplog.text


def test_steps_of_a_run_whose_file_is_gone_are_named(tmp_path, caplog):
    """They count no more: without ``.ckpt-run`` nobody knows which do. With it they do."""
    directory, fast = tmp_path / "run", tmp_path / "fast"
    train(directory, fast, 3)
    file = directory / ".ckpt-run"
    (folder,) = fast.glob("run-*")
    assert "do not count" not in caplog.text
    kept = file.read_bytes()
    file.unlink()
    with ckpt.Checkpointer(directory, local_directory=fast, options=OPTIONS) as run:
        assert run.all_steps() == [0]
    (said,) = [one for one in caplog.messages if "do not count" in one]
    assert str(folder) in said and "steps 2 of" in said and str(directory) in said
    file.write_bytes(kept)
    caplog.clear()
    assert train(directory, fast, 1) == 2
    assert "do not count" not in caplog.text


def test_a_step_that_is_nowhere_is_refused_with_what_both_tiers_have(tmp_path):
    with ckpt.Checkpointer(
        tmp_path / "run", local_directory=tmp_path / "fast", options=OPTIONS
    ) as run:
        for step in range(3):
            run.save(step, {"n": step})
        run.wait_until_finished()
        for call in (
            lambda: run.load(7),
            lambda: run.restore(7, state={"n": 0}),
            lambda: run.delete(7),
        ):
            with pytest.raises(
                ckpt.CheckpointNotFound, match=r"no step 7; it has: 0; local directories have: 2$"
            ):
                call()
