"""``ckpt cp``, ``rm``, ``save-now`` and ``gc``; and what runs have in a fast directory of this host."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace

import typer
from rich.text import Text

from ckpt_core._directory import (
    SIGNS,
    Attempt,
    Backend,
    StepNames,
    is_locked,
    is_meant,
    kind_at,
    read_run_metadata,
    resolve,
    series_of,
    write_run_metadata,
)
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ckpt_core._format.packed import pack
from ckpt_core._format.record import RECORD_FILE, dump_record
from ckpt_core._format.untrusted import SHORT_BYTES
from ckpt_core._run.steps import (
    SAVE_NOW_FILE,
    Steps,
    note_deleted,
    refuse_no_directory,
    refuse_one_checkpoint,
    request_save,
)
from ckpt_core._run.tiers.ended import LocalRun, remove_run, runs_in
from ckpt_core._run.tiers.folders import local_root
from ckpt_core._saved import NativeCheckpoint, open_checkpoint
from ckpt_core._storage import backend_of
from ckpt_core._verify import inspect, verify
from ckpt_core._words import counted, size, time_of
from ckpt_core.cli._shared import console, one_line, print_json, say, table
from ckpt_core.cli._steps import OWNER_FILE, RETIRED, is_run, retire, steps_as_text, steps_in

_OF_ONE = ("ckpt.json", "_CHECKPOINT_METADATA")
"""Of ``SIGNS``, those that the items of a checkpoint do not have."""


def copy(source: str, target: str, *, steps: list[int], prefix: str | None, mirror: bool) -> int:
    """Copies a checkpoint, or steps of a run; 1 if a step is damaged, or the copy may restore another history."""
    if not is_run(source):
        if steps or mirror:
            text = f"{source} is no directory of steps: leave --step and --mirror out"
            raise CheckpointNotFound(text)
        say(f"{source} -> {target}: {size(copy_checkpoint(source, target))}")
        return 0
    origin, replica = steps_in(source, prefix), steps_in(target, prefix)
    wanted, there = sorted({*steps}) or origin.all(), replica.saves()
    for step in wanted:
        origin.refuse_absent(step)
    present = [step for step in wanted if step in there]
    readable = (step for step in present if there[step][0] != "?")
    same = {step for step in readable if same_save(origin.path(step), replica.path(step))}
    others = [step for step in present if step not in same]
    strays = replica.left_by(origin)
    moves = f"moves them to {replica.directory}/{RETIRED}"
    mirrored = f"--mirror {moves if resolve(replica.directory)[1] else 'deletes them'}"
    if mirror and (others or strays):
        say(f"{replica.directory}: {retire(replica, [*others, *strays])}")
        strays = []
    elif others:
        besides = f"; not of its history: {steps_as_text(strays)}" if strays else ""
        raise CheckpointError(
            f"{replica.directory}: nothing was copied. It has another save than {origin.directory} of {steps_as_text(others)}{besides}. "
            f"{mirrored}; or copy to another place"
        )
    _copy_run_metadata(source, target)
    damaged = False
    for step in wanted:
        if step in same:
            say(f"{replica.path(step)} is there already")
            continue
        try:
            one, other = origin.path(step), replica.new_path(step)
            say(f"{one} -> {other}: {size(copy_checkpoint(one, other))}")
        except CheckpointNotFound:
            say(f"step {step} was deleted meanwhile")
        except (CheckpointCorrupt, PermissionError) as error:  # a restore wants the newer ones
            say(str(error))
            damaged = True
    if strays:
        text = f"{steps_as_text(strays)} there, not of the history of {origin.directory}"
        say(f"{replica.directory}: {text}: a restore may go on from them. {mirrored}")
    return 1 if strays or damaged else 0


def _copy_run_metadata(source: str, target: str) -> None:
    """Copies the metadata of the run as a whole, if the target has nothing of the kind."""
    origin, replica = ((backend_of(local), path) for path, local in map(resolve, (source, target)))
    metadata, there = read_run_metadata(*origin), read_run_metadata(*replica)
    if there is None and metadata is not None:
        write_run_metadata(*replica, metadata)
        say(f"{origin[1]} -> {replica[1]}: metadata of the run")
    elif metadata not in (None, there):
        say(f"{replica[1]} has other metadata of the run, which stays")


def remove(paths: Sequence[str], *, steps: list[int], prefix: str | None, yes: bool) -> int:
    """Deletes checkpoints, or ``steps`` of one directory; asks before, unless ``yes``, and deletes nothing if one is none."""
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
    what = counted(len(found), "checkpoint")
    if not yes and not agreed(what):
        say("nothing was deleted")
        return 1
    for path in found:
        try:
            backend_of(resolve(path)[1]).delete(path)
        except BlockingIOError:
            text = "is being read: nothing of it was deleted; try again when that has ended"
            raise CheckpointError(f"{path} {text}") from None
        directory, _, name = path.rpartition("/")
        if (step := StepNames(prefix).parse(name)) is not None and directory:
            note_deleted(directory, step)
    say(f"{what} deleted")
    return 0


def _directories(run: Steps, steps: Sequence[int]) -> list[str]:
    """The directories of steps: the one that counts, and others of its series, such as ``000005`` beside ``5``."""
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

    def read(name: str) -> bytes | None:
        with contextlib.suppress(CheckpointCorrupt):
            return backend.read(standing, name)
        return None

    signed = _has_sign(backend, standing, SIGNS)
    if not backend.is_checkpoint(standing) or (signed and not is_meant(read)):
        raise CheckpointNotFound(f"{text} is no checkpoint: nothing was deleted")
    if not signed:
        inside = (f"{standing}/{name}" for name in backend.children(standing))
        those = "name those, or " if any(_has_sign(backend, one, _OF_ONE) for one in inside) else ""
        raise CheckpointError(
            f"{text} holds folders of Orbax, and nothing says that it is one checkpoint and no folder of several: "
            f"{those}remove the directory itself"
        )
    above = text.rpartition("/")[0]
    alone = _has_sign(backend, standing, _OF_ONE) and not _has_sign(backend, above, SIGNS)
    if above and not above.endswith(":/") and not alone and backend.is_checkpoint(above):
        raise CheckpointError(f"{text} is a part of the checkpoint {above}: nothing was deleted")
    return text


def _has_sign(backend: Backend, path: str, signs: Sequence[str]) -> bool:
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
    total, saved = sum(one.bytes for one in info.items.values()), time_of(info.created_unix_secs)
    return f"{path}: {size(total)} in {', '.join(info.items) or 'no items'}, {saved}"


def agreed(what: str) -> bool:
    """Whether the user agrees to the deletion; raises ``CheckpointError`` without a terminal."""
    if not sys.stdin.isatty():
        raise CheckpointError("nobody is there to be asked whether to delete: say --yes")
    return typer.confirm(f"Delete {what}?")


def save_now(directory: str, *, wait_secs: float, as_json: bool) -> int:
    """Asks the job that saves there for its next step, and waits for it; returns 1 if that takes longer."""
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
    """Deletes what dead writers left, and finishes what they had begun; or only prints the names."""
    text, local = resolve(directory)
    refuse_no_directory(text, local)
    names = backend_of(local).clean(text, only_look=dry_run)
    if as_json:
        print_json({"directory": text, "deleted": not dry_run, "names": names})
        return 0
    done = "would be removed" if dry_run else "removed"
    for line in (*names, f"{len(names)} {done}" if names else "nothing to remove"):
        say(line)
    return 0


def copy_checkpoint(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> int:
    """Copies a checkpoint, one data file at a time, after every byte is verified; the copy keeps its token. Returns its size."""
    opened = open_checkpoint(source)
    if not isinstance(opened, NativeCheckpoint):
        raise CheckpointError(
            f"{opened.path} was not written by ckpt and has no checksums, so nothing of a copy could be verified: "
            f"make a checkpoint of ckpt of it with `ckpt import {shlex.quote(opened.path)} {shlex.quote(os.fspath(target))}`, or "
            "copy the directory with another tool"
        )
    report = verify(source)
    if not report.ok:
        raise CheckpointCorrupt(f"{opened.path} was not copied: {report.problems[0]}")
    (text, local), token = resolve(target), opened.record.token
    with backend_of(local).begin(text, overwrite=False, durable=True, token=token) as attempt:
        with opened.reading():
            copied_bytes = sum(_copy_file(opened, name, attempt) for name in opened.record.files)
        small = attempt.small_files()
        record = replace(opened.record, packed=pack(small) if small else b"")
        attempt.make_durable(RECORD_FILE, dump_record(record))
        attempt.commit()
    return copied_bytes


def same_save(one: str, other: str) -> bool:
    """Whether two checkpoints come from one save, as their records say; raises what ``load`` does if there is none."""
    both = [open_checkpoint(path) for path in (one, other)]
    known = all(isinstance(opened, NativeCheckpoint) for opened in both)
    return known and both[0].save_token == both[1].save_token


def _copy_file(opened: NativeCheckpoint, name: str, attempt: Attempt) -> int:
    """Copies one file; returns its size."""
    expected = opened.record.files[name]
    data = opened.read_unverified(name, expected.size_bytes) or b""
    unchanged = expected.data or zlib.crc32(data) == expected.crc32
    if len(data) != expected.size_bytes or not unchanged:
        raise CheckpointCorrupt(f"{opened.path}: {name} changed while it was copied", file=name)
    if "/d/" not in name or opened.record.is_users(name):
        attempt.write(name, data)
    else:  # its name is random, and no other save has it
        attempt.write_data(name, (data,))
    return len(data)


_MOST_STEPS = 5
"""Maximum number of steps named of a run."""


def _runs(directory: str) -> tuple[str, list[LocalRun]]:
    root = local_root(directory)
    if kind_at(root) != "directory":
        raise CheckpointNotFound(f"{root}: no such directory on this host")
    return root, runs_in(root)


def list_runs(directory: str, *, as_json: bool) -> int:
    """Prints the runs, the longest unused first; returns 0."""
    root, runs = _runs(directory)
    if as_json:
        print_json({"directory": root, "runs": [asdict(run) for run in runs]})
    elif runs:
        names = ("run", "last used", "size", "processes", "steps", "state")
        console().print(table(root, names, list(map(_cells, runs))))
    else:
        say(f"{root}: no runs of ckpt")
    return 0


def _cells(run: LocalRun) -> list[str | Text]:
    names = filter(None, (os.path.basename(run.path), run.persistent))
    name, used = Text("\n".join(map(one_line, names))), time_of(run.used_unix_secs)
    state = ("in use" if run.in_use else "ended") + ("" if run.mine else ", of another user")
    return [name, used, size(run.size_bytes), str(run.processes), _steps(run), state]


def _steps(run: LocalRun) -> str:
    more = f" and {len(run.steps) - _MOST_STEPS} more" if len(run.steps) > _MOST_STEPS else ""
    return ", ".join(map(str, run.steps[-_MOST_STEPS:])) + more


def remove_runs(
    directories: Sequence[str], *, names: Sequence[str], steps: Sequence[int], yes: bool
) -> int:
    """Removes what ended runs left, all of them or those of ``names``; returns 1 if something stays that was to go."""
    if len(directories) != 1 or steps:
        raise CheckpointError(
            "ckpt rm --local takes one local directory, and no --step: to delete a step everywhere, name the persistent "
            "directory, ckpt rm RUN --step N"
        )
    root, runs = _runs(directories[0])
    known = {os.path.basename(run.path): run for run in runs}
    for name in names:
        if name not in known:
            there = ", ".join(known) or "no runs"
            raise CheckpointNotFound(f"{root} has no run {name!r}; it has {there}")
        if (run := known[name]).in_use:
            raise CheckpointError(f"{run.path} is in use by a run that lives: nothing was removed")
    chosen = [run for name, run in known.items() if not run.in_use and (name in names or not names)]
    for run in chosen:
        of = f" of {run.persistent}" if run.persistent else ""
        used = f"steps {_steps(run)}, last used {time_of(run.used_unix_secs)}"
        say(f"{run.path}{of}: {size(run.size_bytes)}, {used}")
    what = counted(len(chosen), "run")
    if not chosen or (not yes and not agreed(f"what {what} left here")):
        say("nothing was removed")
        return 1 if chosen else 0
    stays: list[str] = []
    for run in chosen:
        why = "somebody uses it now, or there is more than ckpt wrote"
        try:
            if remove_run(run):
                continue
        except OSError as error:
            why = str(error)
        stays.append(f"{run.path} stays: {why}")
    say(f"{len(chosen) - len(stays)} of {what} removed")
    for text in stays:
        say(text)
    return 1 if stays else 0
