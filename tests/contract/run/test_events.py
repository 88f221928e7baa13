"""What is told of saves, restores and deletions, to whom; and what a directory says of a run and of its steps."""

import io
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import jax.monitoring
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.takeovers import make_directory  # noqa: F401 (fixtures)

STATE = {"w": np.arange(1000.0), "b": np.ones(3, np.float32)}
BYTES = 8012


class Heard:
    """A listener that keeps everything; how far something has come, which depends on time, on request."""

    def __init__(self, progress: bool = False) -> None:
        self.events: list[ckpt.Event] = []
        self.threads: list[str] = []
        self._progress = progress

    def __call__(self, event: ckpt.Event) -> None:
        if event.kind == "progress" and not self._progress:
            return
        self.events.append(event)
        self.threads.append(threading.current_thread().name)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def test_one_save_and_one_load(tmp_path):
    heard = Heard()
    path = str(tmp_path / "one")
    ckpt.save(path, STATE, options=ckpt.Options(on_event=heard))
    assert heard.kinds == ["save_started", "snapshot_taken", "committed"]
    assert [event.bytes for event in heard.events] == [0, 0, BYTES]
    secs = [event.secs for event in heard.events]
    assert secs == sorted(secs)
    assert all(event.path == path and event.step is None for event in heard.events)

    heard = Heard()
    ckpt.load(path, options=ckpt.Options(on_event=heard))
    assert heard.kinds == ["restore_started", "restored"]
    assert heard.events[-1].bytes == BYTES


def test_a_checkpointer_names_the_steps(tmp_path):
    heard = Heard()
    options = ckpt.Options(on_event=heard)
    with ckpt.Checkpointer(tmp_path, max_to_keep=1, options=options) as checkpointer:
        checkpointer.save(3, STATE)
        checkpointer.wait_until_finished()
        assert [event.step for event in heard.events] == [3, 3, 3]
        assert heard.threads[:2] == ["MainThread"] * 2
        assert heard.threads[2] == "ckpt-save"
        checkpointer.save(4, STATE)
    assert heard.kinds[3:] == ["save_started", "snapshot_taken", "committed", "deleted"]
    assert heard.events[-1].step == 3
    assert heard.events[-1].path == str(tmp_path / "3")
    with ckpt.Checkpointer(tmp_path, options=options) as checkpointer:
        checkpointer.restore_latest(state=STATE)
    assert heard.events[-1].kind == "restored"
    assert heard.events[-1].step == 4


def test_each_committed_copy_that_goes_is_told_in_every_tier(tmp_path):
    """Retention, a rollback, a deletion, a save after going back: what is told to be there is what is there."""
    told = set[str]()

    def listen(event: ckpt.Event) -> None:
        if event.kind == "committed":
            told.add(event.path)
        elif event.kind == "deleted":
            told.remove(event.path)

    def there() -> set[str]:
        names = [*(tmp_path / "run").glob("[0-9]*"), *(tmp_path / "local").glob("*/*/[0-9]*")]
        return {*map(str, names)}

    every = ckpt.when.every_steps(2)
    options = ckpt.Options(on_event=listen, persist_policy=every, local_max_to_keep=2)
    where = {"local_directory": tmp_path / "local", "options": options, "max_to_keep": 3}
    with ckpt.Checkpointer(tmp_path / "run", **where) as run:
        for step in range(8):
            run.save(step, STATE)
            run.wait_until_finished()
            assert told == there()
        assert run.rollback_to(6) == [7] and told == there()
        run.delete(2)
        assert told == there() and len(told) == 3
        run.restore(4, STATE)["state"]
        run.save(5, STATE, force=True)  # step 6 is retired
    assert told == there() and {one[-1] for one in told} == {"4", "5"}


def test_failures_are_told_with_the_error(tmp_path):
    heard = Heard()
    options = ckpt.Options(on_event=heard)
    with pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.save(tmp_path / "one", {"w": object()}, options=options)
    assert heard.kinds == ["save_started", "save_failed"]
    assert isinstance(heard.events[-1].error, ckpt.UnsupportedLeaf)

    ckpt.save(tmp_path / "two", STATE)
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(tmp_path / "two", {"w": np.ones(2)}, options=options)
    assert heard.kinds[2:] == ["restore_started", "restore_failed"]
    assert isinstance(heard.events[-1].error, ckpt.StructureMismatch)

    class Data:
        def get_state(self) -> int:
            return 3

        def set_state(self, state: int) -> None:
            raise ValueError(state)

    data = Data()
    ckpt.save(tmp_path / "three", data=data)
    with pytest.raises(ValueError, match="3"):
        ckpt.restore(tmp_path / "three", data=data, options=options)
    assert heard.kinds[4:] == ["restore_started", "restore_failed"]


def test_a_failure_in_the_background_is_told(tmp_path):
    heard, path = Heard(), tmp_path / "one"

    def gets_in_the_way(event: ckpt.Event) -> None:
        heard(event)
        if event.kind == "snapshot_taken":
            path.mkdir()
            (path / "file").touch()

    pending = ckpt.save_async(path, STATE, options=ckpt.Options(on_event=gets_in_the_way))
    with pytest.raises(ckpt.CheckpointExists):
        pending.result()
    assert heard.kinds[-1] == "save_failed"
    assert isinstance(heard.events[-1].error, ckpt.CheckpointExists)


def test_a_listener_that_raises_costs_nothing(tmp_path, caplog):
    def listen(event: ckpt.Event) -> None:
        if event.kind != "progress":  # which depends on time
            raise ZeroDivisionError(event.kind)

    ckpt.save(tmp_path / "one", STATE, options=ckpt.Options(on_event=listen))
    assert ckpt.verify(tmp_path / "one").ok
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert "ZeroDivisionError: committed" in caplog.text


def test_jax_monitoring(tmp_path):
    secs: dict[str, float] = {}
    scalars: dict[str, float] = {}

    def on_secs(name: str, value: float, **_: Any) -> None:
        if name.startswith("/ckpt/"):
            secs[name] = value

    def on_scalar(name: str, value: float, **_: Any) -> None:
        if name.startswith("/ckpt/"):
            scalars[name] = value

    jax.monitoring.register_event_duration_secs_listener(on_secs)
    jax.monitoring.register_scalar_listener(on_scalar)
    try:
        with ckpt.Checkpointer(tmp_path, max_to_keep=1) as checkpointer:
            checkpointer.save(1, STATE)
            checkpointer.save(2, STATE)
            checkpointer.load(2)
    finally:
        jax.monitoring.unregister_event_duration_listener(on_secs)
        jax.monitoring.unregister_scalar_listener(on_scalar)
    assert set(secs) == {
        f"/ckpt/{kind}"
        for kind in (
            *("save_started", "snapshot_taken", "committed", "deleted"),
            *("restore_started", "restored"),
        )
    }
    assert scalars == {"/ckpt/committed/bytes": BYTES, "/ckpt/restored/bytes": BYTES}
    assert 0 < secs["/ckpt/snapshot_taken"] <= secs["/ckpt/committed"]


def test_one_log_line_per_save(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "ckpt_core"):
        ckpt.save(tmp_path / "one", STATE)
    (record,) = caplog.records
    assert record.name == "ckpt_core"
    assert f"{tmp_path / 'one'}: {BYTES} bytes, blocked" in record.getMessage()
    assert "GB/s" in record.getMessage()


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = ckpt.events.TensorBoard(tmp_path / "board")
    options = ckpt.Options(on_event=board)
    with ckpt.Checkpointer(tmp_path / "run", max_to_keep=1, options=options) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, STATE)
            checkpointer.wait_until_finished()
        checkpointer.load(20)
    board.close()
    read = EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    tags = read.Tags()["scalars"]
    assert {"ckpt/save/blocked_secs", "ckpt/save/total_secs", "ckpt/restore/bytes"} <= set(tags)
    assert [entry.step for entry in read.Scalars("ckpt/save/bytes")] == [10, 20]
    assert [entry.value for entry in read.Scalars("ckpt/save/bytes")] == [BYTES, BYTES]
    assert [entry.step for entry in read.Scalars("ckpt/deleted")] == [10]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def event(kind: Any, **values: Any) -> ckpt.Event:
    return ckpt.Event(kind=kind, path="/runs/7", step=7, **values)


@pytest.mark.parametrize(
    ("kind", "terminal"), [("xterm", True), ("dumb", False), ("unknown", False), ("", False)]
)
def test_the_progress_bar(kind, terminal, monkeypatch):
    """On a terminal that can move its cursor, whatever the one is that the tests run in."""
    pytest.importorskip("rich")
    from rich.console import Console

    monkeypatch.setenv("TERM", kind or "xterm")
    out = Terminal() if kind else io.StringIO()
    bar = ckpt.events.ProgressBar(Console(file=out, force_terminal=bool(kind), width=100))
    bar(event("restore_started"))
    bar(event("progress", bytes=1, total_bytes=100, secs=0.1))
    assert out.getvalue() == ""  # too short so far to be worth showing
    bar(event("progress", bytes=50, total_bytes=100, secs=1.0))
    bar(event("restored", bytes=100))
    assert ("loading step 7" in out.getvalue()) is terminal
    bar(event("progress", bytes=50, total_bytes=100, secs=1.0))
    bar(event("committed", bytes=100))
    assert ("saving step 7" in out.getvalue()) is terminal


def test_one_listener_that_raises_hides_nothing_from_the_others():
    seen: list[Any] = []

    def broken(event: Any) -> None:
        raise ValueError("broken")

    ckpt.events.each(broken, seen.append, seen.append)(ckpt.Event(kind="deleted", path="/x"))
    assert len(seen) == 2


def test_a_listener_of_jax_monitoring_that_raises_costs_nothing(tmp_path):
    def broken(name: str, secs: float, **_: Any) -> None:
        raise ValueError("broken")

    jax.monitoring.register_event_duration_secs_listener(broken)
    try:
        ckpt.save(tmp_path / "one", STATE)
    finally:
        jax.monitoring.unregister_event_duration_listener(broken)
    assert ckpt.verify(tmp_path / "one").ok


SMALL = {"w": np.ones(4)}


def test_run_metadata(directory):
    with ckpt.Checkpointer(directory) as checkpointer:
        assert checkpointer.run_metadata is None
        checkpointer.write_run_metadata({"config": {"width": 8}, "seed": 3})
        checkpointer.save(1, SMALL)
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
    with ckpt.Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match="JSON"):
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
        checkpointer.save(1, SMALL)
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
        checkpointer.save(1, SMALL, metrics={"loss": 0.5}, metadata={"note": "x"})
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
