"""What the children of the crash tests do: first a good save, then the one that is disturbed.

Each scenario prepares a directory without being counted, and then makes one save under the shim.
What was acknowledged is reported at once, so the parent knows what must be there after a kill.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import child
from child import FROZEN, state, version_of

import ckpt_core as ckpt


@dataclass(frozen=True)
class Scenario:
    """How to prepare, and what to disturb."""

    name: str  # of the checkpoint that `save` makes, below the root; a number is a step
    prepare: Callable[[str], Any]  # makes the earlier checkpoints; gives what `save` works on
    save: Callable[..., object]  # of version 2; with `overwrite=True` once more, after it failed

    def later(self, root: str) -> None:
        """A save by a process that knows nothing of this one."""
        if self.name != "2":
            ckpt.save(f"{root}/{self.name}", state(3), overwrite=True)
            return
        with ckpt.Checkpointer(root, max_to_keep=2) as checkpointer:
            checkpointer.save(3, state(3))


def close(context: Any) -> None:
    """Ends what `prepare` gave."""
    if isinstance(context, ckpt.Checkpointer):
        context.close()


def _acknowledge(name: str, version: int) -> None:
    child.report(acknowledged=[name, version])


def _first(name: str) -> Callable[[str], str]:
    """Version 1 under a name."""

    def prepare(root: str) -> str:
        ckpt.save(f"{root}/{name}", state(1))
        _acknowledge(name, 1)
        return root

    return prepare


def _no_exchange(root: str) -> str:
    child.refuse_exchange()
    return _first("second")(root)


def _at(name: str, **more: Any) -> Callable[..., object]:
    return lambda root, overwrite=False: ckpt.save(
        f"{root}/{name}", state(2), overwrite=overwrite, **more
    )


def _replaced(root: str, overwrite: bool = True) -> None:
    ckpt.save(f"{root}/second", state(2), overwrite=True)


def _steps(asynchronous: bool = False, **more: Any) -> Callable[[str], ckpt.Checkpointer]:
    """Two steps; the next one deletes the older of them."""

    def prepare(root: str) -> ckpt.Checkpointer:
        checkpointer = ckpt.Checkpointer(root, max_to_keep=2, asynchronous=asynchronous)
        for step in (0, 1):
            checkpointer.save(step, state(step) | more)
            checkpointer.wait_until_finished()
            _acknowledge(str(step), step)
        return checkpointer

    return prepare


def _step(checkpointer: ckpt.Checkpointer, overwrite: bool = False) -> None:
    checkpointer.save(2, state(2), overwrite=overwrite)
    checkpointer.wait_until_finished()


def _linked_step(checkpointer: ckpt.Checkpointer, overwrite: bool = False) -> None:
    """It shares a file with the one before; reports the bytes of files that stand elsewhere too."""
    checkpointer.save(2, state(2) | {"frozen": FROZEN}, overwrite=overwrite)
    found = os.walk(f"{checkpointer.directory}/2")
    files = [os.stat(os.path.join(parent, name)) for parent, _, names in found for name in names]
    child.report(shared=sum(file.st_size for file in files if file.st_nlink > 1))


def _closed(root: str) -> str:
    _steps()(root).close()
    return root


def _open_and_save(root: str, overwrite: bool = False) -> None:
    """A process takes a directory over and saves a step."""
    with ckpt.Checkpointer(root, max_to_keep=2) as checkpointer:
        checkpointer.save(2, state(2), overwrite=overwrite)


# Several data files, which several threads write at the same time.
_SMALL_FILES = ckpt.Options(target_data_file_bytes=64 * 1024, chunk_bytes=32 * 1024)
SCENARIOS = {
    "new": Scenario("second", _first("first"), _at("second")),
    "files": Scenario("second", _first("first"), _at("second", options=_SMALL_FILES)),
    "nested": Scenario("a/b/second", _first("first"), _at("a/b/second")),
    "overwrite": Scenario("second", _first("second"), _replaced),
    "no_exchange": Scenario("second", _no_exchange, _replaced),
    "step": Scenario("2", _steps(), _step),
    "async_step": Scenario("2", _steps(asynchronous=True), _step),
    "linked": Scenario("2", _steps(frozen=FROZEN), _linked_step),
    "open": Scenario("2", _closed, _open_and_save),
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
    """What stands in `root`, hidden names too, without looking into checkpoints, but for the file by which a Checkpointer claims it."""
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
            scenario.save(context)
    except Exception as error:
        child.report(error=child.describe(error), new=sorted(set(listing(root)) - set(before)))
        child.report(after_error=contents(root))
        scenario.save(context, overwrite=True)
    _acknowledge(scenario.name, 2)
    child.report(left=listing(root))
    close(context)


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
