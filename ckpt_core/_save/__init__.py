"""Saving: flatten, plan, snapshot, write, commit."""

from __future__ import annotations

import difflib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckpt_core import _processes
from ckpt_core._directory import Attempt, Form, LocalForm, StoreForm, resolve
from ckpt_core._errors import CheckpointError, UnsupportedLeaf
from ckpt_core._events import Event, Kind, logger, tell
from ckpt_core._fork import HOME_PID, forked
from ckpt_core._format.orbax import COMMIT_FILE, RESERVED_FOLDERS
from ckpt_core._format.record import RECORD_FILE
from ckpt_core._options import DEFAULTS, Options, checked_options
from ckpt_core._pending import PendingSave
from ckpt_core._save.links import Links
from ckpt_core._save.prepare import PreparedItem, prepare_item, refuse_idle_patterns
from ckpt_core._save.write import CALL, Guard, Notes, Write
from ckpt_core._staging import Copy
from ckpt_core._storage import (
    KeyValues,
    Location,
)

_ARGUMENTS = ("overwrite", "metadata", "options", "items", "metrics", "force")


class _Nothing:
    """Stands for a state that was not passed, as None is a state."""

    def __repr__(self) -> str:
        return "..."  # what help() shows of the argument


NOTHING = _Nothing()


def save(
    path: str | os.PathLike[str],
    state: Any = NOTHING,
    /,
    *,
    overwrite: bool = False,
    metadata: Any = None,
    options: Options | None = None,
    items: Mapping[str, Any] | None = None,
    **named: Any,
) -> None:
    """A durable checkpoint at ``path``; returns when a power cut can no longer lose it.

    Blocks until everything is written, verified to be on disk and renamed into place. Where
    several processes run, all must call it, with the same structure, shardings and options (those that
    matter on disk are compared first); numbers, text, numpy arrays and metadata are those of process 0.

    Args:
        path: of the checkpoint's directory; must not exist. Parents are made.
        state: one pytree or object, stored as one item named ``state``.
        overwrite: replace a checkpoint that is there, in one step.
        metadata: JSON of your own, kept with the checkpoint.
        options: see ``Options``.
        items: further named items, for names that are not identifiers or are argument names.
        **named: named items: models, optimizers, data iterators, pytrees.

    Raises:
        CheckpointExists: something is at ``path``.
        UnsupportedLeaf: a value that cannot be saved, named by path and type.
        OSError: the system refused (disk full, permission); nothing is left behind.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
    """
    chosen = collect_items(state, items, named)
    single = not isinstance(state, _Nothing)
    prepared = prepare_save(
        path,
        chosen,
        single=single,
        overwrite=overwrite,
        metadata=metadata,
        options=options,
        copy=None,
    )
    try:
        prepared.run()
    except BaseException:
        prepared.undo()
        raise


def save_async(
    path: str | os.PathLike[str],
    state: Any = NOTHING,
    /,
    *,
    overwrite: bool = False,
    metadata: Any = None,
    options: Options | None = None,
    items: Mapping[str, Any] | None = None,
    **named: Any,
) -> PendingSave:
    """A save in the background; returns when the state is safe from what the caller does next.

    Arrays may be donated and numpy arrays changed right after (but none whose memory a ``jax.Array``
    was made of without a copy, which jax forbids at any time). Arguments and errors are those of
    ``save``; what fails later is raised by ``.result()``, or printed at exit with exit code 1.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> pending = ckpt.save_async("/tmp/ckpt-docs/two", {"w": jnp.ones(3)}, overwrite=True)
        >>> pending.result()
    """
    chosen = collect_items(state, items, named)
    single = not isinstance(state, _Nothing)
    prepared = prepare_save(
        path,
        chosen,
        single=single,
        overwrite=overwrite,
        metadata=metadata,
        options=options,
        copy=np.copy,
    )
    try:
        pending = PendingSave(resolve(path)[0], prepared.run, "ckpt-save")
        pending.start()
        return pending
    except BaseException:
        prepared.undo()  # nothing, if it goes on
        raise


def form_for(path: str, local: bool) -> Any:
    """How directories work where ``path`` lies."""
    return LocalForm() if local else StoreForm(lambda url: KeyValues(Location(url, False)))


class PreparedSave:
    """A save whose snapshot was taken: either it is run, once, or undone.

    Args:
        write: writes and commits it.
        give_back: gives its room back where it is never written.
    """

    def __init__(self, write: Callable[[], None], give_back: Callable[[], None]) -> None:
        self._write = write
        self._give_back = give_back
        self._claim = threading.Lock()

    def run(self) -> None:
        """Writes and commits; on failure nothing is left behind."""
        if self._claim.acquire(blocking=False):
            self._write()

    def undo(self) -> None:
        """Gives its room back, if it was not run."""
        if self._claim.acquire(blocking=False):
            self._give_back()


def prepare_save(
    path: str | os.PathLike[str],
    items: Mapping[str, Any],
    *,
    single: bool,
    overwrite: bool,
    metadata: Any,
    options: Options | None,
    copy: Copy | None,
    metrics: Mapping[str, float] | None = None,
    guard: Guard | None = None,
    links: Links | None = None,
    step: int | None = None,
    around: Callable[[Callable[[], None]], None] | None = None,
) -> PreparedSave:
    """Takes the snapshot now, of all that was passed; gives what writes and commits it.

    Args:
        copy: copies host memory that the caller could change; None where nothing is copied.
        metrics: numbers of the step.
        guard: asked who may write: before anything is written, and before the commit.
        links: what a Checkpointer remembers of its last step, to share unchanged files with it.
        step: for events.
        around: calls what writes and commits, and does what goes with it, in the same thread.
        (others: see ``save``)
    """
    if os.getpid() != HOME_PID:
        raise forked()
    options = DEFAULTS if options is None else checked_options(options)
    target, local = resolve(path)
    story = Story(target, step, options)
    processes = _processes.this_run()
    tag = _processes.next_round()
    form: Form = form_for(target, local)
    token = secrets.token_hex(16)
    prepared: list[PreparedItem] = []
    attempt: Attempt | None = None
    refusal: Exception | None = None
    said, numbers, blocking_secs = None, dict(metrics or {}), 0.0

    def give_back() -> None:
        if attempt is not None:
            attempt.abort()

    def never_begun() -> None:
        processes.refuse(tag, CALL, CheckpointError("its save could not begin"))
        give_back()

    def write_and_commit() -> None:
        try:
            notes = Notes(single, overwrite, said, numbers, guard, links, step, blocking_secs)
            write = Write(form, target, local, prepared, notes, processes, options, token, tag)
            written = write.run(attempt, refusal)
        except BaseException as error:
            give_back()
            story.happened("save_failed", error=error)
            raise
        story.committed(written, blocking_secs)

    run = write_and_commit if around is None else lambda: around(write_and_commit)
    saving = PreparedSave(run, never_begun)
    story.happened("save_started")
    try:
        said = frozen_metadata(metadata)
        prepared = prepare_items(items, processes, options, copy, single)
        if processes.index == 0:
            if guard is not None:
                guard.take()
                if not local:  # there a try begins by removing what another one has written
                    guard.check()
            attempt = form.begin(target, overwrite=overwrite, durable=options.durable, token=token)
        blocking_secs = story.happened("snapshot_taken")
    except BaseException as error:
        if processes.count == 1 or not isinstance(error, Exception):
            processes.refuse(tag, CALL, error)
            give_back()
            story.happened("save_failed", error=error)
            raise
        refusal = error  # the others wait for this process: it is told to them, and raised then
    return saving


class Story:
    """What is told of one save, to the log and to whoever listens."""

    def __init__(self, path: str, step: int | None, options: Options) -> None:
        self._path = path
        self._step = step
        self._listener = options.on_event
        self._began = time.monotonic()

    def happened(
        self, kind: Kind, written_bytes: int = 0, error: BaseException | None = None
    ) -> float:
        """Tells it, and gives the seconds since the save was called."""
        secs = time.monotonic() - self._began
        event = Event(
            kind=kind,
            path=self._path,
            step=self._step,
            bytes=written_bytes,
            secs=secs,
            error=error,
        )
        tell(event, self._listener)
        return secs

    def committed(self, written_bytes: int, blocking_secs: float) -> None:
        """The end, with the one line that a save writes to the log."""
        secs = self.happened("committed", written_bytes)
        logger.info(
            "%s: %d bytes, blocked %.3f s, total %.3f s, %.2f GB/s",
            self._path,
            written_bytes,
            blocking_secs,
            secs,
            written_bytes / max(secs, 1e-9) / 1e9,
        )


def prepare_items(
    items: Mapping[str, Any],
    processes: _processes.Processes,
    options: Options,
    copy: Copy | None,
    single: bool,
    own: bool = False,
) -> list[PreparedItem]:
    """``prepare_item`` of all items of a save."""
    prepared = [
        prepare_named(name, value, processes, options, copy, single, own)
        for name, value in items.items()
    ]
    if isinstance(options.compression, Mapping):
        refuse_idle_patterns(prepared, options.compression)
    return prepared


def prepare_named(
    name: str,
    value: Any,
    processes: _processes.Processes,
    options: Options,
    copy: Copy | None,
    single: bool,
    own: bool = False,
) -> PreparedItem:
    """``prepare_item``; what cannot be saved is named with the item, where there are several."""
    try:
        return prepare_item(name, value, processes, options, copy, own)
    except UnsupportedLeaf as error:
        if single:
            raise
        message = f"item {name!r}: {error}"
        raise UnsupportedLeaf(message, leaf=error.leaf, type_name=error.type_name) from error


def collect_items(
    state: Any, items: Mapping[str, Any] | None, named: Mapping[str, Any]
) -> dict[str, Any]:
    """The items by name that a call's arguments ask for.

    Raises:
        TypeError: a state together with items, none of both, or a name that looks like a
            misspelt argument.
    """
    twice = sorted(set(items or {}) & set(named))
    if twice:
        raise TypeError(f"items {', '.join(twice)} were passed twice: by name and in items=")
    chosen = {**(items or {}), **named}
    if not isinstance(state, _Nothing):
        if chosen:
            raise TypeError(
                f"pass one state, or named items ({', '.join(chosen)}), not both: "
                "give the state a name too"
            )
        return {"state": state}
    if not chosen:
        raise TypeError("nothing to save: pass a state, or named items such as model=model")
    for name in named:
        close = difflib.get_close_matches(name, _ARGUMENTS, n=1, cutoff=0.8)
        if close:
            raise TypeError(
                f"{name!r} looks like the argument {close[0]!r}: to save an item of this name, "
                f"pass items={{{name!r}: ...}}"
            )
    for name in chosen:
        _check_item_name(name)
    return chosen


def _check_item_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"item names must be text, got {name!r}")
    bad = (
        not name
        or "/" in name
        or ".orbax-checkpoint-tmp" in name
        or "\0" in name
        or name.startswith((".", "_"))
        or len(name) > 200
    )
    taken = {*RESERVED_FOLDERS, RECORD_FILE, COMMIT_FILE}
    if bad or name in taken:
        raise ValueError(
            f"{name!r} cannot be the name of an item: use letters, digits, '-', '_' and '.', not "
            f"beginning with '.' or '_', and none of {', '.join(sorted(taken))}"
        )


def frozen_metadata(metadata: Any) -> Any:
    """Metadata as it is now, and as JSON gives it back.

    Raises:
        TypeError: JSON cannot hold it.
    """
    try:
        return json.loads(json.dumps(metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata must be plain JSON values: {error}") from error
