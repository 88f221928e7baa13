"""Checkpoints in a file system: written under a hidden name, made durable, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_core._directory import files, hidden_names, owner
from ckpt_core._directory.hidden_names import KEPT, REPLACED, TEMPORARY
from ckpt_core._directory.paths import SIGNS, Look, already_there, refuse_lost_link, refuse_path
from ckpt_core._errors import VISIBLE, name_file
from ckpt_core._format.record import FileRecord
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._platform import FOLDER, WINDOWS

_BUFFER_BYTES = 256 * 1024
_ABORT_TRIES = 100
_ABORT_PAUSE_SECS = 0.02
_LOOKS = 5  # at a path that vanished, as it does for a moment when it is replaced by two renames
_MOST_TRASH_NAME_BYTES = 120  # leaves room for a suffix; some file systems limit names to 143


class PosixBackend:
    """Checkpoints as directories; paths are absolute. ``ObjectStoreBackend`` has the same methods for URLs."""

    def begin(self, path: str, *, overwrite: bool, durable: bool, token: str) -> LocalAttempt:
        """Starts an attempt, which ``token`` identifies, to write the checkpoint at ``path``; one process calls it. ``durable``
        syncs all files and directories. CheckpointExists if what is at ``path`` must not or cannot be replaced.
        """
        if WINDOWS:
            raise files.cannot_write(path)
        if not path.isascii():
            refuse_path(path)
        parent, name = os.path.split(path)
        beside = hidden_names.of(parent, name)
        temporary = hidden_names.make(TEMPORARY, parent, name)
        aside = hidden_names.replaced(path) if beside else None
        if aside is not None:  # a replacement was interrupted between its two renames
            os.rename(aside, path)
        hidden_names.refuse_occupied(path, overwrite=overwrite)
        created = make_directories(parent, durable)
        attempt = LocalAttempt(path, temporary, overwrite, durable, created)
        try:
            if beside:
                attempt.superseded = _clean_named(parent, beside)
            os.mkdir(temporary)
        except BaseException as error:
            files.remove_empty([temporary, *created])
            if isinstance(error, OSError) and error.filename == temporary:
                error.filename = path  # the one that the caller knows
            raise
        return attempt

    def join(self, path: str, attempt_path: str, *, durable: bool) -> LocalAttempt:
        """The attempt that another process began, in which this process writes its files."""
        return LocalAttempt(path, attempt_path, False, durable, [])

    def read(self, path: str, name: str, limit_bytes: int | None = None) -> bytes | None:
        """The content of a file of a checkpoint, or None if there is none; follows links. CheckpointCorrupt if it is no
        regular file, a dangling link, or larger than ``limit_bytes`` (by default ``most_bytes`` of its name).
        """
        limit = most_bytes(name) if limit_bytes is None else limit_bytes
        return files.read_bounded(path, name, limit)

    def put(self, path: str, name: str, data: bytes) -> None:
        """Atomically writes or replaces a small file next to the checkpoints."""
        self._put_held(path, name, data).close()
        sync_directory(path)

    def claim(self, path: str, name: str, data: bytes) -> owner.Claim:
        """Writes a file and keeps it locked until the claim is closed or the process ends; a store has no locks."""
        contested = owner.is_locked(os.path.join(path, name))
        return owner.Claim(self._put_held(path, name, data), contested)

    def release(self, path: str, name: str, beginning: bytes) -> None:
        """Deletes a file that ``claim`` wrote, if it still begins so. A store, which could not give back another's, keeps it."""
        file = os.path.join(path, name)
        if not (self.read(path, name) or b"").startswith(beginning):
            return
        taken = hidden_names.make(TEMPORARY, path, name)
        try:
            os.rename(file, taken)
            if not (self.read(*os.path.split(taken)) or b"").startswith(beginning):
                with contextlib.suppress(FileExistsError):  # unless a third one has claimed it
                    files.link_new(taken, file)  # of a writer who claimed it since the first look
        finally:
            files.remove(taken)

    def _put_held(self, path: str, name: str, data: bytes) -> owner.LockFile:
        """Atomically writes a file and returns it, open and with a shared lock."""
        if WINDOWS:
            raise files.cannot_write(path)
        # Durable, because a later save syncs only the directories that it creates itself.
        make_directories(path, durable=True)
        temporary = hidden_names.make(TEMPORARY, path, name)
        try:
            # O_RDWR: NFS wants the file open for reading for a shared lock.
            file = owner.LockFile(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            file.lock(owner.SHARED)
            with open(file.descriptor, "wb", closefd=False) as stream:
                stream.write(data)
            files.sync_file(file.descriptor)
            os.replace(temporary, os.path.join(path, name))
        except BaseException:  # also an interrupt by a signal handler
            files.remove(temporary)
            raise
        return file

    def reading(self, path: str, head: bytes) -> contextlib.AbstractContextManager[None]:
        """Keeps the checkpoint at ``path`` from being deleted while the block runs. Raises FileNotFoundError if it
        was deleted or replaced since the caller read ``head``, the beginning of its record.
        """
        return owner.reading(os.path.join(path, SIGNS[0]), head)

    def files(self, path: str, known_bytes: Mapping[str, int] | None = None) -> dict[str, int]:
        """Relative path and size of every file of a checkpoint; -1 for anything but a regular file. Follows links,
        but enters each directory once. An object store, which has to read a file for its size, takes ``known_bytes``.
        """
        return files.file_sizes(path)

    def size(self, path: str, name: str) -> int | None:
        """Size of one file, as in ``files``; None if there is none."""
        return files.size_of(os.path.join(path, name))

    def remove(self, path: str, name: str) -> None:
        """Deletes a small file next to the checkpoints, if it is there."""
        file = os.path.join(path, name)
        if self.exists(file):
            files.remove(file)
            sync_directory(path)

    def exists(self, path: str) -> bool:
        """Whether there is anything at ``path``."""
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno in files.ABSENT:
                return False
            raise
        return True

    def children(self, path: str) -> list[str]:
        """The ``children`` of a ``look``."""
        return self.look(path).children

    def look(self, path: str) -> Look:
        """What a directory holds, by one listing; nothing if there is no ``path``."""
        found, hidden = list[str](), frozenset[str]()
        for _ in range(_LOOKS):
            try:
                changed = os.stat(path).st_mtime_ns
                with os.scandir(path) as entries:
                    inside = list(entries)
                hidden = frozenset(one.name for one in inside if one.name[0] == ".")
                shown = (one for one in inside if one.name not in hidden)
                found = [one.name for one in shown if one.is_dir() or _leads_nowhere(one)]
                if any(name.startswith(REPLACED) for name in hidden):
                    found += hidden_names.interrupted(path).keys() - set(found)
                # a listing is not one moment: what is renamed meanwhile may be in it under neither name
                if os.stat(path).st_mtime_ns == changed:
                    break
            except (FileNotFoundError, NotADirectoryError):
                return Look([], lambda _: False, frozenset())
        return Look(found, lambda name: self.is_checkpoint(f"{path}/{name}"), hidden)

    def is_checkpoint(self, path: str) -> bool:
        """Whether a committed checkpoint, of ckpt or of Orbax, lies at ``path``."""
        record = os.path.join(path, SIGNS[0])
        for _ in range(_LOOKS):
            if os.path.exists(record):
                return True
            try:
                inside = os.listdir(path)
            except PermissionError:  # what cannot be read is not absent
                return True
            except (FileNotFoundError, NotADirectoryError):
                if os.path.islink(path):  # to a disk that is not mounted: opening it says so
                    return True
                inside = []
            if any(name in SIGNS or _is_item(f"{path}/{name}") for name in inside):
                return True
            if inside:  # maybe of a directory that was replaced, and is being deleted: look again
                return os.path.exists(record)
            if hidden_names.replaced(path) is not None:
                return True
        return False

    def delete(self, path: str, trash: str | None = None) -> None:
        """Deletes a checkpoint: first hides it from readers, then deletes its data. With ``trash`` it is moved into
        the directory of that name next to it, which is made if missing. Raises BlockingIOError if a reader holds it.
        """
        if WINDOWS:
            raise files.cannot_write(path)
        parent, name = os.path.split(path)
        standing = self.replaced(path) or path
        if reason := why_immovable(standing):
            raise PermissionError(errno.EACCES, reason, standing)
        gone = hidden_names.make(TEMPORARY, parent, name)
        if trash is not None:
            gone = os.path.join(parent, trash, name)
            os.makedirs(os.path.dirname(gone), exist_ok=True)
            if os.path.lexists(gone):
                kept = hidden_names.shortened(name, _MOST_TRASH_NAME_BYTES)
                gone = os.path.join(parent, trash, f"{kept}.{secrets.token_hex(4)}")
        try:
            with owner.deleting(os.path.join(standing, SIGNS[0])):
                # First delete what this checkpoint replaced, else `replaced` would bring it back.
                beside = hidden_names.of(parent, name)
                old = [f"{parent}/{one.entry}" for one in beside if one.kind != TEMPORARY]
                old = [path for path in old if path != standing]
                if old:
                    sync_directory(parent)
                    hidden_names.discard(old)
                os.rename(standing, gone)
            if trash is None:
                os.unlink(gone) if os.path.islink(gone) else shutil.rmtree(gone)
        except BaseException:
            if trash is None:
                files.remove(gone)  # after the rename the deletion is irrevocable: try to finish it
            raise

    def clean(self, path: str, *, only_look: bool = False) -> list[str]:
        """Deletes what dead writers left in the directory ``path``, unless it is to ``only_look``; returns the names."""
        if only_look:
            return hidden_names.removable(path)
        if WINDOWS:
            return []
        for name, aside in hidden_names.interrupted(path).items():
            hidden = hidden_names.parse(os.path.basename(aside))
            if hidden is not None and not owner.lives(hidden.owner):
                with contextlib.suppress(OSError):  # readers find it under the hidden name too
                    os.rename(aside, os.path.join(path, name))
        entries = hidden_names.removable(path)
        with contextlib.suppress(OSError):
            if entries:
                sync_directory(path)
                hidden_names.discard(os.path.join(path, entry) for entry in entries)
                return entries
        return []

    def replaced(self, path: str) -> str | None:
        """Path of the old checkpoint, if a replacement of ``path`` was interrupted; else None."""
        if os.path.lexists(os.path.join(path, SIGNS[0])):  # the common case, without a listing
            return None
        return hidden_names.replaced(path)


@dataclass
class LocalAttempt(contextlib.AbstractContextManager["LocalAttempt"]):
    """One attempt to write one checkpoint; readers see nothing before ``commit``. A ``with`` block aborts it if it raises.
    ``StoreAttempt`` has the same methods.
    """

    target: str
    path: str  # directory or URL to which the small files of this attempt are written
    overwrite: bool
    durable: bool
    created: list[str]  # directories above it
    data_prefix: str = ""  # of the names of data files, by which they are known as this attempt's
    superseded: list[str] = field(default_factory=list[str])  # to be deleted after the commit
    written: os.stat_result | None = None  # status of the directory, set by commit()
    replaced: str | None = None  # path to which the commit moves the old checkpoint

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.abort()

    def write(self, name: str, data: bytes, *, until_commit: bool = False) -> FileRecord:
        """Writes a small file; ``name`` is relative to ``path``. With ``until_commit`` another process reads it
        before the commit, and an object store deletes it then.
        """
        self.write_data(name, (data,))
        return FileRecord(len(data), zlib.crc32(data))

    def write_data(self, name: str, parts: Iterable[bytes]) -> None:
        """Writes a file of any size, in any thread; ``name`` is relative to ``path``, in an object store to the checkpoint."""
        full = os.path.join(self.path, name)
        if "/" in name:
            os.makedirs(os.path.dirname(full), exist_ok=True)
        try:
            with open(full, "xb", buffering=_BUFFER_BYTES) as file:
                for part in parts:
                    file.write(part)
                file.flush()
                if self.durable:
                    files.sync_file(file.fileno())
        except OSError as error:
            name_file(error, full)
            raise

    def read(self, name: str) -> bytes:
        """The content of a file that this process wrote, or another one with ``until_commit``."""
        with open(os.path.join(self.path, name), "rb") as file:
            return file.read()

    def take(self, name: str) -> bytes:
        """``read`` of a file that is not needed any more."""
        data = self.read(name)
        os.unlink(os.path.join(self.path, name))
        return data

    def small_files(self) -> Mapping[str, bytes]:
        """Files that this process has not written yet, because they are to stand in the record."""
        return {}

    def files(self, known_bytes: Mapping[str, int]) -> dict[str, int]:
        """Relative path and size of every file written so far; in a store, ``known_bytes`` has those of other processes."""
        return files.file_sizes(self.path)

    def make_durable(self, record_name: str, record: bytes) -> None:
        """Writes the record after all other files, also of other processes, and makes all durable."""
        if self.durable:
            for directory, _, _ in os.walk(self.path, topdown=False, onerror=files.unless_absent):
                if directory != self.path:
                    sync_directory(directory, durable=True)
        # The record comes last: a directory without it is not a checkpoint.
        self.write(record_name, record)
        if self.durable:
            sync_directory(self.path, durable=True)

    def commit(self) -> None:
        """Makes the durable checkpoint visible to readers, and then deletes the one that it replaces. An error after it
        became visible undoes nothing, and ``is_visible`` recognizes it.
        """
        self.written = os.lstat(self.path)
        try:
            self._put_in_place()
            if self.durable:
                sync_directory(os.path.dirname(self.target))
        except BaseException as error:
            if not self._is_at(self.target, unknown=True):
                raise  # not visible: the caller aborts
            # The checkpoint is visible: even a failed rename may have been carried out.
            if self.replaced is not None:  # kept, since the new one may not be durable
                parent, name = os.path.split(self.target)
                with contextlib.suppress(OSError):  # it then keeps its current hidden name
                    os.rename(self.replaced, hidden_names.make(KEPT, parent, name))
            shown = _with_advice(error, self.target)
            if shown is error:
                raise
            raise shown from error
        self.created = []
        old = self.superseded if self.replaced is None else [self.replaced, *self.superseded]
        if old:
            hidden_names.discard(old)

    def _put_in_place(self) -> None:
        """Renames the attempt to its target; a checkpoint there is moved to a hidden name."""
        if not self.overwrite or not hidden_names.names_in(self.target):
            self._rename_to_target()
            return
        self.replaced = self.path
        if files.exchange(self.path, self.target):
            return
        parent, name = os.path.split(self.target)
        if self.superseded:  # between the two renames, only one old checkpoint may be found
            sync_directory(parent)
            hidden_names.discard(self.superseded)
        aside = self.replaced = hidden_names.make(REPLACED, parent, name)
        try:
            os.rename(self.target, aside)
            self._rename_to_target()
        except BaseException:
            if not os.path.lexists(self.target):
                with contextlib.suppress(OSError):  # readers find it under the hidden name too
                    os.rename(aside, self.target)
            raise

    def _rename_to_target(self) -> None:
        try:
            os.rename(self.path, self.target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise already_there(self.target) from error
            if error.errno in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP):
                bucket = f"if {self.target} is in a mounted bucket"
                error.add_note(f"{bucket}, give its gs:// or s3:// URL")
            raise

    def _is_at(self, path: str, *, unknown: bool) -> bool:
        """Whether this attempt's directory is at ``path``; ``unknown`` if lstat fails."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        except OSError:
            return unknown
        return self.written is not None and os.path.samestat(status, self.written)

    def abort(self) -> None:
        """Deletes the files of this attempt, unless it is already visible; never raises."""
        if self.written is not None and not self._is_at(self.path, unknown=False):
            return  # already visible; the hidden name is now the replaced checkpoint's, or free
        # Other threads and processes may still be writing and recreate directories: retry for 2 s.
        for _ in range(_ABORT_TRIES):
            files.remove(self.path)
            time.sleep(_ABORT_PAUSE_SECS)
            if not os.path.lexists(self.path):
                break
        files.remove_empty(self.created)


def _clean_named(parent: str, beside: list[hidden_names.Hidden]) -> list[str]:
    """Deletes what dead attempts left; returns old checkpoints to delete after the commit."""
    paths = {os.path.join(parent, one.entry): one for one in beside}
    saves = {path: one.owner for path, one in paths.items() if one.kind == TEMPORARY}
    dead = [path for path, process in saves.items() if owner.is_dead(process, path)]
    if dead:
        with contextlib.suppress(OSError):
            # first: one of them may be a checkpoint that was replaced by a rename that is not durable yet
            sync_directory(parent)
            hidden_names.discard(dead)
    return [path for path in paths if path not in saves]


def why_immovable(path: str) -> str:
    """Whose directory it is, if this process may not write in it, and so moves neither it nor what is in it; else empty."""
    if not os.path.isdir(path) or os.access(path, os.W_OK):
        return ""
    return (
        f"{path} belongs to user {os.lstat(path).st_uid}, and this process may not write in it, so it moves and deletes nothing "
        f"there: its owner allows that by chmod -R g+w {shlex.quote(os.path.dirname(path))}"
    )


def _leads_nowhere(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


def _is_item(path: str) -> bool:
    """Whether a folder is an item that Orbax has written; one that may not be looked into is none."""
    with contextlib.suppress(PermissionError):
        return bool(files.kind_at(f"{path}/_METADATA"))
    return False


def _with_advice(error: BaseException, path: str) -> BaseException:
    """The error of a commit after which the checkpoint is visible, with advice; keeps its type."""
    advice = (
        f"the checkpoint is {VISIBLE}: it was renamed, but its directory is not known to be synced, so "
        "a power cut may still take it back. What it replaced, if anything, is kept beside it. To be "
        "sure, save it again, with overwrite=True"
    )
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, f"{os.strerror(error.errno)}: {advice}", path)
    error.add_note(advice)
    return error


def make_directories(path: str, durable: bool) -> list[str]:
    """Creates ``path`` and its missing parents; returns the created ones, deepest first."""
    missing: list[str] = []
    current = path
    while not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    try:
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            if files.kind_at(directory) != "directory":
                refuse_lost_link(directory)
                files.refuse_file(directory)
            if durable:
                sync_directory(os.path.dirname(directory))
    except OSError:
        files.remove_empty(missing)
        raise
    return missing


def sync_directory(path: str, *, durable: bool = False) -> None:
    """Fsyncs a directory. Some network file systems cannot, with EINVAL, which only a ``durable`` checkpoint raises."""
    descriptor = os.open(path, FOLDER)
    try:
        files.sync_file(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if durable:
            what = "directories cannot be synced here, so that a power cut could lose a checkpoint: save with Options(durable=False)"
            raise OSError(errno.EINVAL, what, path) from error
    finally:
        os.close(descriptor)
