"""What the children of the crash tests do: first a good save, then the one that is disturbed.

Each scenario prepares a directory without being counted, and then makes one save under the shim.
What was acknowledged is reported at once, so the parent knows what must be there after a kill.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import child
from states import FROZEN, state, version_of

import ckpt_core as ckpt


@dataclass(frozen=True)
class Scenario:
    """How to prepare, what to disturb, and what a later, undisturbed process does.

    Attributes:
        name: of the checkpoint that `disturbed` makes, below the root.
        prepare: makes the earlier checkpoints; returns what `disturbed` and `again` work on.
        disturbed: the save of version 2 that is counted and killed.
        again: the same save once more, after it failed.
        later: a save by a process that knows nothing of this one.
    """

    name: str
    prepare: Callable[[str], Any]
    disturbed: Callable[[Any], None]
    again: Callable[[Any], None]
    later: Callable[[str], None]
    close: Callable[[Any], None] = lambda context: None


def _acknowledge(name: str, version: int) -> None:
    child.report(acknowledged=[name, version])


# ---- save to a new path -------------------------------------------------------------------------


def _prepare_new(root: str) -> str:
    ckpt.save(f"{root}/first", state(1))
    _acknowledge("first", 1)
    return root


def _later_path(root: str) -> None:
    ckpt.save(f"{root}/second", state(3), overwrite=True)


NEW = Scenario(
    name="second",
    prepare=_prepare_new,
    disturbed=lambda root: ckpt.save(f"{root}/second", state(2)),
    again=lambda root: ckpt.save(f"{root}/second", state(2), overwrite=True),
    later=_later_path,
)

_SMALL_FILES = ckpt.Options(target_data_file_bytes=64 * 1024, chunk_bytes=32 * 1024)


def _save_in_small_files(root: str, *, overwrite: bool = False) -> None:
    ckpt.save(f"{root}/second", state(2), overwrite=overwrite, options=_SMALL_FILES)


# Several data files, which TensorStore's threads write at the same time.
FILES = Scenario(
    name="second",
    prepare=_prepare_new,
    disturbed=_save_in_small_files,
    again=lambda root: _save_in_small_files(root, overwrite=True),
    later=_later_path,
)

# ---- overwrite a path ---------------------------------------------------------------------------


def _prepare_overwrite(root: str) -> str:
    ckpt.save(f"{root}/second", state(1))
    _acknowledge("second", 1)
    return root


def _overwrite(root: str) -> None:
    ckpt.save(f"{root}/second", state(2), overwrite=True)


OVERWRITE = Scenario(
    name="second",
    prepare=_prepare_overwrite,
    disturbed=_overwrite,
    again=_overwrite,
    later=_later_path,
)


def _prepare_no_exchange(root: str) -> str:
    child.refuse_exchange()
    return _prepare_overwrite(root)


NO_EXCHANGE = Scenario(
    name="second",
    prepare=_prepare_no_exchange,
    disturbed=_overwrite,
    again=_overwrite,
    later=_later_path,
)

# ---- save below directories that do not exist ---------------------------------------------------


def _later_nested(root: str) -> None:
    ckpt.save(f"{root}/a/b/second", state(3), overwrite=True)


NESTED = Scenario(
    name="a/b/second",
    prepare=_prepare_new,
    disturbed=lambda root: ckpt.save(f"{root}/a/b/second", state(2)),
    again=lambda root: ckpt.save(f"{root}/a/b/second", state(2), overwrite=True),
    later=_later_nested,
)

# ---- a further step, which deletes an older one -------------------------------------------------


def _checkpointer(root: str, *, asynchronous: bool) -> ckpt.Checkpointer:
    checkpointer = ckpt.Checkpointer(root, max_to_keep=2, asynchronous=asynchronous)
    for step in (0, 1):
        checkpointer.save(step, state(step))
        checkpointer.wait_until_finished()
        _acknowledge(str(step), step)
    return checkpointer


def _step(checkpointer: ckpt.Checkpointer, *, overwrite: bool = False) -> None:
    checkpointer.save(2, state(2), overwrite=overwrite)
    checkpointer.wait_until_finished()


def _later_step(root: str) -> None:
    with ckpt.Checkpointer(root, max_to_keep=2) as checkpointer:
        checkpointer.save(3, state(3))


def _close(checkpointer: ckpt.Checkpointer) -> None:
    checkpointer.close()


STEP = Scenario(
    name="2",
    prepare=lambda root: _checkpointer(root, asynchronous=False),
    disturbed=_step,
    again=lambda checkpointer: _step(checkpointer, overwrite=True),
    later=_later_step,
    close=_close,
)
ASYNC_STEP = Scenario(
    name="2",
    prepare=lambda root: _checkpointer(root, asynchronous=True),
    disturbed=_step,
    again=lambda checkpointer: _step(checkpointer, overwrite=True),
    later=_later_step,
    close=_close,
)

# ---- a further step that shares files with the one before ---------------------------------------


def _prepare_linked(root: str) -> ckpt.Checkpointer:
    checkpointer = ckpt.Checkpointer(root, max_to_keep=2, asynchronous=False)
    for step in (0, 1):
        checkpointer.save(step, state(step) | {"frozen": FROZEN})
        _acknowledge(str(step), step)
    return checkpointer


def _linked_step(checkpointer: ckpt.Checkpointer, *, overwrite: bool = False) -> None:
    checkpointer.save(2, state(2) | {"frozen": FROZEN}, overwrite=overwrite)
    child.report(shared=_shared_bytes(f"{checkpointer.directory}/2"))


def _shared_bytes(path: str) -> int:
    """Bytes of the files of a checkpoint that stand elsewhere too."""
    files = [os.path.join(parent, name) for parent, _, names in os.walk(path) for name in names]
    return sum(os.stat(file).st_size for file in files if os.stat(file).st_nlink > 1)


LINKED = Scenario(
    name="2",
    prepare=_prepare_linked,
    disturbed=_linked_step,
    again=lambda checkpointer: _linked_step(checkpointer, overwrite=True),
    later=_later_step,
    close=_close,
)

# ---- a process that takes a directory over and saves a step -------------------------------------


def _prepare_open(root: str) -> str:
    _checkpointer(root, asynchronous=False).close()
    return root


def _open_and_save(root: str, *, overwrite: bool = False) -> None:
    with ckpt.Checkpointer(root, max_to_keep=2) as checkpointer:
        checkpointer.save(2, state(2), overwrite=overwrite)


OPEN = Scenario(
    name="2",
    prepare=_prepare_open,
    disturbed=_open_and_save,
    again=lambda root: _open_and_save(root, overwrite=True),
    later=_later_step,
)

SCENARIOS = {
    "new": NEW,
    "files": FILES,
    "nested": NESTED,
    "overwrite": OVERWRITE,
    "no_exchange": NO_EXCHANGE,
    "step": STEP,
    "async_step": ASYNC_STEP,
    "linked": LINKED,
    "open": OPEN,
}
PATHS = ("first", "second", "a/b/second")


def contents(root: str) -> dict[str, int]:
    """The version of every checkpoint that a reader finds in `root`, each compared bit for bit."""
    names = [name for name in PATHS if _loads(f"{root}/{name}")]
    if names:
        return {name: version_of(ckpt.load(f"{root}/{name}")) for name in names}
    with ckpt.Checkpointer(root, read_only=True) as reader:
        found = {str(step): version_of(reader.load(step)) for step in reader.all_steps()}
        restored = reader.restore_latest(state=state(0), unexpected="ignore")
        assert (restored is None) == (not found)
        if restored is not None:
            assert version_of(restored["state"]) == restored.step == max(reader.all_steps())
    return found


def _loads(path: str) -> bool:
    try:
        ckpt.load(path)
    except ckpt.CheckpointNotFound:
        return False
    return True


def listing(root: str) -> list[str]:
    """What stands in `root`, hidden names too, without looking into checkpoints.

    The file by which a Checkpointer claims its directory belongs there and is no junk.
    """
    found: list[str] = []
    for parent, directories, files in os.walk(root):
        if "_CHECKPOINT_METADATA" in files:
            directories.clear()
            continue
        found += [os.path.relpath(os.path.join(parent, name), root) for name in directories + files]
    return sorted(name for name in found if name != ".ckpt-owner")


# ---- what children are asked to run -------------------------------------------------------------


def save(name: str, root: str) -> None:
    """Prepares, saves under the shim; after an error says what is left and tries once more."""
    scenario = SCENARIOS[name]
    context = scenario.prepare(root)
    before = listing(root)
    try:
        with child.armed():
            scenario.disturbed(context)
    except Exception as error:
        child.report(error=child.describe(error), new=sorted(set(listing(root)) - set(before)))
        child.report(after_error=contents(root))
        scenario.again(context)
    _acknowledge(scenario.name, 2)
    child.report(left=listing(root))
    scenario.close(context)


def later(name: str, root: str) -> None:
    """What the next process does: reads everything, saves, and says what then stands there."""
    child.report(found=contents(root))
    SCENARIOS[name].later(root)
    child.report(contents=contents(root), left=listing(root))


def later_and_save(name: str, dead_root: str, root: str) -> None:
    """`later` where another process died, and then `save` somewhere else: two jobs, one start."""
    later(name, dead_root)
    child.report(now="save")
    save(name, root)
