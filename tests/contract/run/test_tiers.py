"""A local directory over the persistent one, in a process alone; a local step that cannot be read is neither passed over nor deleted."""

import errno
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import CheckpointCorrupt, CheckpointNotFound
from tests.contract.faults.crafted.signed import read_record, write_record
from tests.support import seams
from tests.support.damage import failing_reads, turn_a_bit
from tests.support.refusals import refuse

NEVER = ckpt.Options(persist_policy=ckpt.when.at_steps([]))
EVERY_THIRD = ckpt.Options(persist_policy=ckpt.when.every_steps(3))


def state(step: int) -> dict[str, Any]:
    return {
        "w": jnp.arange(1 << 14, dtype=jnp.float32).reshape(128, -1) / 7 + step,
        "key": jax.random.key(step),
        "n": step,
        "host": np.full(3, step, np.int16),
    }


def same(found: Any, step: int) -> bool:
    wanted = state(step)
    return (
        found.keys() == wanted.keys()
        and np.asarray(found["w"]).tobytes() == np.asarray(wanted["w"]).tobytes()
        and (jax.random.key_data(found["key"]) == jax.random.key_data(wanted["key"])).all()
        and found["n"] == step
        and found["host"].dtype == np.int16
        and (found["host"] == step).all()
    )


class Run:
    """A run that is started again and again over the same two directories."""

    def __init__(self, root: Path) -> None:
        self.persistent, self.local = root / "persistent", root / "local"

    def start(self, options: ckpt.Options | None = EVERY_THIRD, **kw: Any) -> ckpt.Checkpointer:
        return ckpt.Checkpointer(self.persistent, local_directory=self.local, options=options, **kw)

    def train(self, steps: range, **more: Any) -> None:
        with self.start(**more) as checkpointer:
            for step in steps:
                assert checkpointer.save(step, state(step))

    def local_steps(self) -> dict[int, Path]:
        return {int(path.name): path for path in self.local.glob("run-*/process_0-of-1/[0-9]*")}

    def restored(self, **more: Any) -> Any:
        with self.start(**more) as checkpointer:
            found = checkpointer.restore_latest(state=state(99))
            assert found is None or same(found["state"], found.step)
            return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_local_takes_every_save_and_persistent_some(run, asynchronous):
    run.train(range(5), asynchronous=asynchronous)
    with ckpt.Checkpointer(run.persistent) as persistent:
        assert persistent.all_steps() == [0, 3]
        assert same(persistent.load(3), 3)
    assert list(run.local_steps()) == [4]
    assert Path(run.restored().path) == run.local_steps()[4]
    for step in (run.local_steps()[4], run.persistent / "3"):
        assert ckpt.verify(step).ok  # alone, a process's own step is a checkpoint like any other


def test_the_last_save_before_the_end_is_persistent_too(run):
    policy = ckpt.when.every_steps(2) | ckpt.when.preempted()
    with run.start(NEVER, save_policy=policy) as checkpointer:
        checkpointer.save(2, state(2))
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpointer.should_stop
        assert checkpointer.save(3, state(3))
    assert ckpt.Checkpointer(run.persistent).all_steps() == [3]


def test_what_both_hold_is_asked_and_read_as_one(run):
    with run.start() as checkpointer:
        for step in range(5):
            checkpointer.save(step, state(step), metrics={"loss": step / 2}, metadata={"at": step})
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [0, 3, 4] and checkpointer.latest_step() == 4
        assert checkpointer.metrics(4) == {"loss": 2.0} and checkpointer.metadata(4) == {"at": 4}
        assert checkpointer.metrics(3) == {"loss": 1.5}
        assert same(checkpointer.load(4), 4) and same(checkpointer.load(0), 0)
        assert same(checkpointer.restore(4, state=state(9))["state"], 4)
        assert same(checkpointer.restore(3, state=state(9))["state"], 3)
        assert list(checkpointer.inspect(4).items) == ["state"]
        assert list(checkpointer.explain()) == [0, 3, 4]
        assert "local" in checkpointer.explain()[4]
        with pytest.raises(CheckpointNotFound, match="no step 2"):
            checkpointer.restore(2, state=state(9))
    with run.start(read_only=True) as reader:
        assert reader.all_steps() == [0, 3, 4]
        assert not reader.should_save(5)
        run.train(range(5, 6))  # which deletes the local step 4
        with pytest.raises(CheckpointNotFound):
            reader.load(4)


def test_a_local_directory_that_is_lost_is_named(run, caplog):
    assert run.restored() is None
    with run.start() as checkpointer:
        for step in range(5):
            checkpointer.save(step, state(step))
        checkpointer.wait_until_finished()
        shutil.rmtree(run.local)
        restored = checkpointer.restore_latest(state=state(9))
        assert restored is not None and restored.step == 3 and same(restored["state"], 3)
        checkpointer.save(5, state(5))
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [0, 3, 5] and list(run.local_steps()) == [5]
    assert run.restored().step == 5 and caplog.text.count("the steps that it alone had") == 1
    shutil.rmtree(run.local)  # as a restart of the host does, if it was in memory
    assert run.restored().step == 3 and caplog.text.count("the steps that it alone had") == 2


def test_damage_in_a_step_that_is_local_only(run):
    run.train(range(5))
    turn_a_bit(run.local_steps()[4])
    with run.start() as checkpointer, pytest.raises(CheckpointCorrupt):
        checkpointer.restore_latest(state=state(9), strict_latest=True)
    with run.start() as checkpointer:
        with pytest.warns(RuntimeWarning, match="step 4 is damaged"):
            restored = checkpointer.restore_latest(state=state(9))
        assert restored is not None and restored.step == 3 and same(restored["state"], 3)
        assert checkpointer.save(4, state(4))  # it is not in the way
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [0, 3, 4]
    assert run.restored().step == 4


def test_never_from_scratch_when_the_only_copy_is_damaged(run):
    run.train(range(3), options=NEVER)
    turn_a_bit(run.local_steps()[2])
    with (
        run.start(NEVER) as checkpointer,
        pytest.warns(RuntimeWarning, match="damaged"),
        pytest.raises(CheckpointCorrupt, match="from scratch"),
    ):
        checkpointer.restore_latest(state=state(9))


@pytest.mark.parametrize("broken", ["ckpt.json", "state/manifest.ocdbt", "a bit"])
def test_of_a_damaged_local_copy_the_other_one_is_restored(run, broken):
    run.train(range(4))
    if broken == "a bit":
        turn_a_bit(run.local_steps()[3])
    else:
        (run.local_steps()[3] / broken).unlink()
    assert Path(run.restored().path) == run.persistent / "3"


def test_a_mismatch_is_raised_and_a_missing_item_is_named(run):
    run.train(range(5))
    with run.start() as checkpointer:
        with pytest.raises(ckpt.StructureMismatch):
            checkpointer.restore_latest(state={**state(0), "w": jnp.zeros(5)})
        with pytest.raises(CheckpointNotFound, match="no item 'model'"):
            checkpointer.restore_latest(model=state(0))
        assert checkpointer.latest_step() == 4  # nothing was taken for damage


def test_a_directory_that_was_removed_to_start_anew(run):
    """Local steps belong to the persistent directory that they were saved under."""
    run.train(range(5))
    shutil.rmtree(run.persistent)
    assert run.restored() is None
    run.train(range(1, 3))
    assert run.restored().step == 2


def test_what_processes_left_that_are_gone(run):
    run.train(range(1))
    (folder,) = run.local.iterdir()
    for name in ("process_1-of-2", "process_1-of-1", "process_2-of-3", "mine"):
        shutil.copytree(folder / "process_0-of-1", folder / name)
    # what a process holds that lives
    held = os.open(folder / "process_2-of-3" / ".ckpt-owner", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    with run.start() as checkpointer:
        assert checkpointer.latest_step() == 0
        checkpointer.save(1, state(1))
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["mine", "process_0-of-1", "process_2-of-3"]
    os.close(held)


def held(monkeypatch: pytest.MonkeyPatch, place: Path) -> seams.Gate:
    """Holds back what is written below a directory."""
    gate = seams.Gate()
    seams.at(monkeypatch, "write", before=gate, where=seams.below(place))
    return gate


def test_ten_local_saves_end_while_a_persistent_one_is_held_back(run, monkeypatch):
    gate = held(monkeypatch, run.persistent)
    options = ckpt.Options(persist_policy=ckpt.when.every_steps(100), local_max_to_keep=20)
    with run.start(options) as checkpointer:
        for step in range(11):  # the eleventh begins when the tenth has ended
            assert checkpointer.save(step, state(step))
        assert gate.entered.wait(60)
        assert {*range(10)} <= run.local_steps().keys()
        assert not (run.persistent / "0").exists()
        with run.start(options, read_only=True) as reader:
            assert same(reader.load(9), 9)
        threading.Timer(0.2, gate.go.set).start()
        # due in the persistent directory: waits for the one before
        checkpointer.save(100, state(100))
        assert gate.go.is_set() and (run.persistent / "0").exists()
    steps = [*range(11), 100]  # close() drained both
    with run.start(options, read_only=True) as reader:
        assert reader.all_steps() == steps
        assert all(same(reader.load(step), step) for step in steps)
    for path in (run.persistent / "0", run.persistent / "100", *run.local_steps().values()):
        assert ckpt.verify(path).ok


@pytest.mark.parametrize("tier", ["local", "persistent"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failure_of_one_tier_is_raised_and_the_other_has_the_step(
    run, monkeypatch, tier, asynchronous
):
    where = seams.below(getattr(run, tier))
    seams.at(monkeypatch, "commit", before=seams.fail(), where=where, nth=1)
    checkpointer = run.start(None, asynchronous=asynchronous)

    def save() -> None:
        checkpointer.save(0, state(0))
        checkpointer.wait_until_finished()

    with pytest.raises(OSError, match="No space left"):
        save()
    assert checkpointer.all_steps() == [0]
    assert bool(run.local_steps()) == (tier == "persistent")
    assert (run.persistent / "0").exists() == (tier == "local")
    # what failed can be tried again; what is in the persistent directory needs no second try
    assert checkpointer.save(0, state(0)) == (tier == "persistent")
    checkpointer.save(1, state(1))
    checkpointer.close()
    assert list(run.local_steps()) == [1] and (run.persistent / "1").exists()
    assert not [*run.persistent.rglob(".ckpt-tmp.*"), *run.local.rglob(".ckpt-tmp.*")]


def test_where_a_local_directory_may_be(run, tmp_path):
    with pytest.raises(ValueError, match="file system of this host"):
        ckpt.Checkpointer(run.persistent, local_directory="memory://local")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        ckpt.Checkpointer(run.persistent, local_directory=tmp_path / "file")
    with ckpt.Checkpointer("memory://tiers/one", local_directory=run.local) as checkpointer:
        checkpointer.save(0, state(0))
        checkpointer.wait_until_finished()
        assert same(checkpointer.restore(0, state=state(1))["state"], 0)
    assert list(run.local_steps()) == [0]


def test_directories_that_a_run_makes_are_synced_whoever_makes_them(tmp_path, monkeypatch):
    """Notes such as the run's name are written before the first save, and make its directories."""
    synced: set[str] = set()
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    run, fast = tmp_path / "runs" / "run", tmp_path / "nvme" / "fast"
    with ckpt.Checkpointer(run, local_directory=fast) as checkpointer:
        checkpointer.save(0, state(0))
    (name,) = fast.iterdir()
    for directory in (tmp_path, run.parent, run, fast.parent, fast, name):
        assert str(directory) in synced, directory


def test_local_directories_that_are_left_out_are_named(run, caplog):
    for local in (run.local, None):
        with ckpt.Checkpointer(run.persistent, local_directory=local) as checkpointer:
            assert "had local directories" not in caplog.text
            checkpointer.restore_latest({"n": 0})
            checkpointer.save(1, {"n": 0})
    assert "had local directories" in caplog.text


def small_state(step: int) -> dict[str, Any]:
    return {"n": step, "w": np.full(300, step, np.float32)}


def start(root: Path, **options: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(root / "run", local_directory=root / "local", **options)


@pytest.fixture(name="newest")
def make_newest(tmp_path: Path) -> Path:
    """Steps 0 to 3, of which the last is in the local directory alone; where that is."""
    with start(tmp_path, options=ckpt.Options(local_max_to_keep=5)) as checkpointer:
        for step in range(4):
            checkpointer.save(step, small_state(step))
    shutil.rmtree(tmp_path / "run" / "3")
    (record,) = (tmp_path / "local").rglob("3/ckpt.json")
    return record.parent


def test_a_newer_format_is_told_and_stays(newest, tmp_path):
    record = read_record(newest)
    record["format_version"] = 99
    write_record(newest, record)
    before = (newest / "ckpt.json").read_bytes()
    for read_only in (False, True):
        reader = start(tmp_path, read_only=read_only)
        with pytest.raises(ckpt.CheckpointError, match=r"local step 3 .*upgrade ckpt") as told:
            reader.restore_latest(small_state(9))
        assert not isinstance(told.value, ckpt.CheckpointCorrupt)
        reader.close()
    with start(tmp_path) as checkpointer:
        checkpointer.restore(1, state=small_state(9)).state  # noqa: B018
    with start(tmp_path) as checkpointer:
        checkpointer.save(7, small_state(7), force=True)
    assert (newest / "ckpt.json").read_bytes() == before
    with start(tmp_path) as checkpointer:
        restored = checkpointer.restore_latest(small_state(9))
        assert restored is not None and restored.step == 7


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("open", number) for number in (errno.EIO, errno.ESTALE, errno.EACCES)),
        *(("scandir", number) for number in (errno.ENODEV, errno.ETIMEDOUT, errno.EMFILE)),
    ],
)
def test_what_the_system_refuses_is_told(newest, tmp_path, monkeypatch, name, number):
    with monkeypatch.context() as patch:
        refuse(patch, newest if name == "open" else newest.parent, number, calls=(name,))
        reader = start(tmp_path, read_only=True)
        with pytest.raises(OSError, match="cannot be read, and training does not go back") as told:
            reader.restore_latest(small_state(9))
        reader.close()
    assert told.value.errno == number and str(newest.parent) in str(told.value)
    with start(tmp_path) as checkpointer:
        restored = checkpointer.restore_latest(small_state(9))
        assert restored is not None and restored.step == 3


@pytest.mark.linux("/proc/self/fd")
@pytest.mark.parametrize("of", ["preadv", "pread"])
def test_a_disk_that_does_not_give_the_data_of_the_newest_step_is_no_damage(
    newest, tmp_path, monkeypatch, of
):
    """Nothing is read from an older step instead, nothing moved to ``damaged/``; the older one by its number."""
    with monkeypatch.context() as patch:
        met = failing_reads(patch, newest, of)
        with start(tmp_path) as checkpointer:
            with pytest.raises(OSError, match=r"step 3 cannot be read .*restore\(step") as caught:
                checkpointer.restore_latest(small_state(9))
            assert (
                met
                and caught.value.errno == errno.EIO
                and not isinstance(caught.value, ckpt.CheckpointError)
            )
            with pytest.raises(OSError, match="Input/output error"):
                checkpointer.load(3)
        with start(tmp_path) as checkpointer:
            assert checkpointer.restore(2, small_state(9)).step == 2
    assert newest.is_dir() and not (tmp_path / "run" / "damaged").exists()
    with start(tmp_path, read_only=True) as reader:
        restored = reader.restore_latest(small_state(9))
        assert restored is not None and restored.step == 3


@pytest.mark.linux("/proc/self/fd")
def test_the_persistent_copy_is_read_if_the_local_disk_does_not_give_its_own(
    newest, tmp_path, monkeypatch
):
    met = failing_reads(monkeypatch, newest.parent / "2")
    with start(tmp_path) as checkpointer:
        restored = checkpointer.restore(2, small_state(9))
        assert met and restored.state["n"] == 2 and restored.path == str(tmp_path / "run" / "2")


@pytest.mark.linux("/proc/self/fd")
def test_a_load_reads_the_local_copy_if_the_persistent_one_cannot_be_read(
    newest, tmp_path, monkeypatch
):
    with start(tmp_path, read_only=True) as reader:
        with monkeypatch.context() as patch:
            met = failing_reads(patch, tmp_path / "run" / "2")
            assert reader.load(2)["n"] == 2 and met
        turn_a_bit(tmp_path / "run" / "1")
        assert reader.load(1)["n"] == 1
        assert reader.load(3)["n"] == 3
        turn_a_bit(newest)
        with pytest.raises(ckpt.CheckpointCorrupt, match="step 3"):
            reader.load(3)


def test_a_folder_of_runs_that_cannot_be_listed(newest, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        met = refuse(patch, newest.parents[1], errno.EIO, calls=("scandir",))
        with start(tmp_path) as checkpointer:
            with pytest.raises(OSError, match="local steps cannot be read"):
                checkpointer.restore_latest(small_state(9))
            assert met and checkpointer.restore(2, small_state(9)).step == 2
    with start(tmp_path) as checkpointer:
        restored = checkpointer.restore_latest(small_state(9))
        assert restored is not None and restored.step == 3


def test_what_goes_on_from_the_newest_step_is_refused_while_one_cannot_be_read(
    newest, tmp_path, monkeypatch
):
    """Who asked for ``latest_step()``, and restored that, or began anew, lost the newest one at the next save."""
    unread = r"local step 3 cannot be read"
    for others in (True, False):
        if not others:
            for step in range(3):
                shutil.rmtree(tmp_path / "run" / str(step))
                shutil.rmtree(newest.parent / str(step), ignore_errors=True)
        with monkeypatch.context() as patch:
            refuse(patch, newest / "ckpt.json", errno.EIO, calls=("open",))
            refuse(patch, tmp_path / "run" / "3" / "ckpt.json", errno.EIO, calls=("open",))
            checkpointer = start(tmp_path)
        with checkpointer:
            for call in (checkpointer.load, checkpointer.inspect):
                with pytest.raises(OSError, match=unread):
                    call(3)
            with pytest.raises(OSError, match=unread):
                checkpointer.latest_step()
            if not others:
                with pytest.raises(OSError, match=unread):
                    checkpointer.save(0, small_state(0))
            assert newest.exists()
            restored = checkpointer.restore_latest(small_state(9))  # it looks anew
            assert restored is not None and restored.step == 3 == checkpointer.latest_step()


@pytest.fixture(name="unread")
def make_unread(
    newest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ckpt.Checkpointer]:
    """A writer that could not read the newest step, 3, for the moment in which it began."""
    with begun_without([newest], tmp_path, monkeypatch) as checkpointer:
        yield checkpointer


def begun_without(
    where: list[Path], root: Path, monkeypatch: pytest.MonkeyPatch, call: str = "open"
) -> ckpt.Checkpointer:
    """A writer that could open, or list, nothing in some directories for the moment in which it began."""
    with monkeypatch.context() as patch:
        for path in where:
            refuse(patch, path, errno.EIO, calls=(call,))
        return start(root)


@pytest.mark.parametrize("force", [False, True])
def test_nor_that_of_an_older_one(newest, tmp_path, monkeypatch, force):
    """Several cannot be read: which is told of is the newest, and what counts is each."""
    shutil.rmtree(tmp_path / "run" / "2")
    with begun_without([newest, newest.parent / "2"], tmp_path, monkeypatch) as checkpointer:
        for call in (checkpointer.delete, checkpointer.inspect, checkpointer.load):
            with pytest.raises(OSError, match="the local step 2 cannot be read"):
                call(2)
        with pytest.raises(ckpt.CheckpointExists, match="step 2 is there already"):
            checkpointer.save(2, small_state(9), force=force)
    with start(tmp_path) as checkpointer:
        assert checkpointer.all_steps() == [0, 1, 2, 3]
        assert checkpointer.restore(2, small_state(9)).state["n"] == 2


@pytest.mark.parametrize("step", [3, 4])
def test_nor_does_one_begin_while_none_can_be_listed(newest, tmp_path, monkeypatch, step):
    """What it would replace, and what its retention would delete, is not known."""
    with begun_without([newest.parents[1]], tmp_path, monkeypatch, "scandir") as checkpointer:
        with pytest.raises(OSError, match=r"local steps cannot be read.*restore_latest\(\) looks"):
            checkpointer.save(step, small_state(9))
        restored = checkpointer.restore_latest(small_state(9))
        assert restored is not None and (restored.step, restored.state["n"]) == (3, 3)
        assert checkpointer.save(4, small_state(4))


@pytest.mark.parametrize("to", [1, 0])
def test_who_has_left_it_hears_no_more_of_it(unread, to):
    with pytest.raises(OSError, match="the local step 3 cannot be read"):
        unread.latest_step()
    gone = unread.rollback_to(to)
    assert (gone, unread.latest_step()) == ([*range(to + 1, 4)], to)
    unread.save(to + 1, small_state(to + 1))
    unread.wait_until_finished()
    assert unread.latest_step() == to + 1


def test_who_restores_an_older_one_and_saves_hears_no_more_of_it(unread):
    assert unread.restore(1, small_state(9)).state["n"] == 1
    unread.save(2, small_state(2))
    unread.wait_until_finished()
    assert unread.latest_step() == 2


def test_it_is_not_deleted_as_if_it_were_not_there(unread):
    for call in (unread.delete, unread.inspect, unread.load):
        with pytest.raises(OSError, match="the local step 3 cannot be read, which says nothing"):
            call(3)
    assert unread.restore_latest(small_state(9)).step == 3
    unread.delete(3)
    assert unread.latest_step() == 2
