"""``ckpt cp``, ``rm``, ``save-now`` and ``gc``: what changes a directory of steps."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence

import typer

from ckpt_core._copy import copy_checkpoint, same_save
from ckpt_core._directory import (
    SIGNS,
    Backend,
    StepNames,
    is_locked,
    is_meant,
    read_run_metadata,
    resolve,
    series_of,
    write_run_metadata,
)
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ckpt_core._format.untrusted import SHORT_BYTES
from ckpt_core._run.steps import (
    SAVE_NOW_FILE,
    Steps,
    note_deleted,
    refuse_no_directory,
    refuse_one_checkpoint,
    request_save,
)
from ckpt_core._storage import backend_of
from ckpt_core._verify import inspect
from ckpt_core.cli._steps import OWNER_FILE, RETIRED, is_run, of_steps, retire, steps_in
from ckpt_core.cli._text import counted, print_json, say, size, when

_OF_ONE = ("ckpt.json", "_CHECKPOINT_METADATA")
"""Of ``SIGNS``, those that the items of a checkpoint do not have."""


def copy(source: str, target: str, *, steps: list[int], prefix: str | None, mirror: bool) -> int:
    """Copies a checkpoint, or steps of a run. Returns 1 if a step is damaged, or a restore of the copy may go on from another
    history.
    """
    if not is_run(source):
        if steps or mirror:
            text = f"{source} is no directory of steps: leave --step and --mirror out"
            raise CheckpointNotFound(text)
        _copy_one(source, target)
        return 0
    ours, theirs = steps_in(source, prefix), steps_in(target, prefix)
    wanted, there = sorted({*steps}) or ours.all(), theirs.saves()
    for step in wanted:
        ours.refuse_absent(step)
    readable = [step for step in wanted if step in there and there[step][0] != "?"]
    same = {step for step in readable if same_save(ours.path(step), theirs.path(step))}
    others = [step for step in wanted if step in there and step not in same]
    strays = theirs.left_by(ours)
    mirrored = "--mirror deletes them"
    if resolve(theirs.directory)[1]:
        mirrored = f"--mirror moves them to {theirs.directory}/{RETIRED}"
    if mirror and (others or strays):
        say(f"{theirs.directory}: {retire(theirs, [*others, *strays])}")
        strays = []
    elif others:
        besides = f"; not of its history: {of_steps(strays)}" if strays else ""
        raise CheckpointError(
            f"{theirs.directory}: nothing was copied. It has another save than {ours.directory} of {of_steps(others)}{besides}. "
            f"{mirrored}; or copy to another place"
        )
    _copy_run_metadata(source, target)
    damaged = False
    for step in wanted:
        if step in same:
            say(f"{theirs.path(step)} is there already")
            continue
        try:
            _copy_one(ours.path(step), theirs.new_path(step))
        except CheckpointNotFound:
            say(f"step {step} was deleted meanwhile")
        except (CheckpointCorrupt, PermissionError) as error:  # a restore wants the newer ones
            say(str(error))
            damaged = True
    if strays:
        text = f"{of_steps(strays)} there, not of the history of {ours.directory}"
        say(f"{theirs.directory}: {text}: a restore may go on from them. {mirrored}")
    return 1 if strays or damaged else 0


def _copy_run_metadata(source: str, target: str) -> None:
    """Copies the metadata of the run as a whole, if the target has nothing of the kind."""
    ours, theirs = ((backend_of(local), path) for path, local in map(resolve, (source, target)))
    metadata, there = read_run_metadata(*ours), read_run_metadata(*theirs)
    if there is None and metadata is not None:
        write_run_metadata(*theirs, metadata)
        say(f"{ours[1]} -> {theirs[1]}: metadata of the run")
    elif metadata not in (None, there):
        say(f"{theirs[1]} has other metadata of the run, which stays")


def _copy_one(source: str, target: str) -> None:
    say(f"{source} -> {target}: {size(copy_checkpoint(source, target))}")


def remove(paths: Sequence[str], *, steps: list[int], prefix: str | None, yes: bool) -> int:
    """Deletes checkpoints, or with ``steps`` steps of one directory; asks before, unless ``yes``, and deletes nothing if one is no checkpoint."""
    if steps:
        if len(paths) != 1:
            raise CheckpointError("--step takes its steps from one directory of steps")
        run = steps_in(paths[0], prefix)
        for step in steps:
            run.refuse_absent(step)
        found = _directories(run, steps)
    else:
        found = list(dict.fromkeys(map(_one_checkpoint, paths)))
    for path in found:
        say(_described(path))
    what = counted(len(found), "checkpoint", "checkpoints")
    if not yes and not agreed(what):
        say("nothing was deleted")
        return 1
    for path in found:
        try:
            backend_of(resolve(path)[1]).delete(path)
        except BlockingIOError:
            raise CheckpointError(
                f"{path} is being read: nothing of it was deleted; try again when that has ended"
            ) from None
        directory, _, name = path.rpartition("/")
        if (step := StepNames(prefix).parse(name)) is not None and directory:
            note_deleted(directory, step)
    say(f"{what} deleted")
    return 0


def _directories(run: Steps, steps: Sequence[int]) -> list[str]:
    """The directories of steps: of each the one that counts, and others of its series, such as ``000005`` beside ``5``."""
    listing = run.look()
    found: list[str] = []
    for step in dict.fromkeys(steps):
        names = listing.directories(step)
        same = [name for name in names if series_of(name) == series_of(names[0])]
        # the first one is the one that counts: it goes last, so that no older one counts in between
        found += [f"{run.directory}/{name}" for name in reversed(same)]
    return found


def _one_checkpoint(path: str) -> str:
    text, local = resolve(path)
    if local and os.path.islink(text):
        raise CheckpointError(
            f"{text} is a link to {os.path.realpath(text)}: name the checkpoint itself, or unlink it"
        )
    if is_run(text):
        raise CheckpointError(
            f"{text} is a directory of steps: say which to delete with --step, or remove the directory itself"
        )
    backend = backend_of(local)
    standing = backend.replaced(text) or text
    if not backend.is_checkpoint(standing) or not _is_meant(backend, standing):
        raise CheckpointNotFound(f"{text} is no checkpoint: nothing was deleted")
    if not _says_so(backend, standing, SIGNS):
        inside = (f"{standing}/{name}" for name in backend.children(standing))
        those = "name those, or " if any(_says_so(backend, one, _OF_ONE) for one in inside) else ""
        raise CheckpointError(
            f"{text} holds folders of Orbax, and nothing says that it is one checkpoint and no folder of several: "
            f"{those}remove the directory itself"
        )
    above = text.rpartition("/")[0]
    alone = _says_so(backend, standing, _OF_ONE) and not _says_so(backend, above, SIGNS)
    if above and not above.endswith(":/") and not alone and backend.is_checkpoint(above):
        raise CheckpointError(f"{text} is a part of the checkpoint {above}: nothing was deleted")
    return text


def _is_meant(backend: Backend, path: str) -> bool:
    """Whether a folder is a checkpoint by what is in it: of Orbax, what its folders say counts, too."""

    def read(name: str) -> bytes | None:
        with contextlib.suppress(CheckpointCorrupt):
            return backend.read(path, name)
        return None

    return not _says_so(backend, path, SIGNS) or is_meant(read)


def _says_so(backend: Backend, path: str, signs: Sequence[str]) -> bool:
    """Whether a folder itself says that it is a checkpoint, and not only folders in it."""
    return bool(path) and any(backend.size(path, sign) is not None for sign in signs)


def _described(path: str) -> str:
    """A line about a checkpoint: a damaged one can be deleted, too, and one of a newer format."""
    try:
        info = inspect(path)
    except CheckpointCorrupt:
        return f"{path}: damaged"
    except (CheckpointError, OSError) as error:
        return f"{path}: cannot be read: {error}"
    total = sum(item.bytes for item in info.items.values())
    return f"{path}: {size(total)} in {', '.join(info.items) or 'no items'}, {when(info.created_unix_secs)}"


def agreed(what: str) -> bool:
    """Whether the user agrees to the deletion; raises ``CheckpointError`` without a terminal."""
    if not sys.stdin.isatty():
        raise CheckpointError("nobody is there to be asked whether to delete: say --yes")
    return typer.confirm(f"Delete {what}?")


def save_now(directory: str, *, wait_secs: float, as_json: bool) -> int:
    """Asks the job that saves in a directory for its next step, and waits for it; returns 1 if that takes longer."""
    path, local = resolve(directory)
    refuse_no_directory(path, local)
    backend, deadline = backend_of(local), time.monotonic() + wait_secs
    refuse_one_checkpoint(backend, path, local)
    asked, is_new = request_save(backend, path)
    if not as_json:
        say(f"{path} {'is' if is_new else 'was'} asked to save its next step")
        if local and not is_locked(f"{path}/{OWNER_FILE}"):
            say("nobody on this machine writes there now; the next start will save one")
    while there := backend.read(path, SAVE_NOW_FILE, SHORT_BYTES) == asked:
        if time.monotonic() >= deadline:
            break
        time.sleep(min(wait_secs, 1.0))
    step = None if there else steps_in(path).latest()
    if as_json:
        print_json({"directory": path, "new": is_new, "saved": not there, "newest_step": step})
    elif not there:
        say(f"it is saved; the newest step is {step}")
    elif wait_secs:
        say(f"it was not saved within {wait_secs:g} s, and is asked for until somebody saves it")
    return 1 if there and wait_secs else 0


def collect_garbage(directory: str, *, dry_run: bool, as_json: bool) -> int:
    """Deletes what dead writers left, and finishes what they had committed or begun to delete; or only prints the names."""
    text, local = resolve(directory)
    refuse_no_directory(text, local)
    names = backend_of(local).clean(text, only_look=dry_run)
    if as_json:
        print_json({"directory": text, "deleted": not dry_run, "names": names})
        return 0
    for name in names:
        say(name)
    done = "would be removed" if dry_run else "removed"
    say(f"{len(names)} {done}" if names else "nothing to remove")
    return 0
