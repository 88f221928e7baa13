"""A run whose persistent directory is named in another way, through a link, has the local steps that it had."""

import shutil
from pathlib import Path

import pytest

import ckpt_core as ckpt

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
