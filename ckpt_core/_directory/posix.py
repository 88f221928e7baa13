"""Checkpoints in a file system; ``writing`` has the attempt that writes one, and its commit."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import shutil
from collections.abc import Mapping

from ckpt_core._directory import hidden_names
from ckpt_core._directory.backend import SIGNS, Backend, Look
from ckpt_core._directory.files import file_sizes, read_bounded, size_of
from ckpt_core._directory.locks import SHARED, Claim, LockFile, deleting, is_locked, reading
from ckpt_core._directory.owner import is_dead
from ckpt_core._directory.syscalls import (
    ABSENT,
    cannot_write,
    kind_at,
    link_new,
    remove,
    sync_file,
)
from ckpt_core._directory.writing import (
    LocalAttempt,
    is_synced,
    make_directories,
    refuse_occupied,
    refuse_path,
    remove_empty,
    sync_directory,
)
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._platform import WINDOWS

_LOOKS = 5
"""How often a path is looked at that vanished: a checkpoint that is replaced by two renames is gone for a moment each time."""
_MOST_TRASH_NAME_BYTES = 120  # leaves room for a suffix; some file systems limit names to 143


def _is_item(path: str) -> bool:
    """Whether a folder is an item that Orbax has written; one that may not be looked into is none."""
    try:
        return bool(kind_at(f"{path}/_METADATA"))
    except PermissionError:
        return False


class PosixBackend(Backend):
    """Checkpoints as directories; see ``Backend``."""

    def begin(self, path: str, *, overwrite: bool, durable: bool, token: str) -> LocalAttempt:
        if WINDOWS:
            raise cannot_write(path)
        if not path.isascii():
            refuse_path(path)
        parent, name = os.path.split(path)
        beside = hidden_names.of(parent, name)
        temporary = hidden_names.make(hidden_names.TEMPORARY, parent, name)
        aside = hidden_names.replaced(path) if beside else None
        if aside is not None:  # a replacement was interrupted between its two renames
            os.rename(aside, path)
        refuse_occupied(path, overwrite=overwrite)
        created = make_directories(parent, durable)
        attempt = LocalAttempt(
            path, temporary, overwrite=overwrite, durable=durable, created=created
        )
        try:
            if beside:
                attempt.superseded = _clean_named(parent, beside)
            os.mkdir(temporary)
        except BaseException as error:
            remove_empty([temporary, *created])
            if isinstance(error, OSError) and error.filename == temporary:
                error.filename = path  # the one that the caller knows
            raise
        return attempt

    def join(self, path: str, attempt_path: str, *, durable: bool) -> LocalAttempt:
        return LocalAttempt(path, attempt_path, overwrite=False, durable=durable, created=[])

    def read(self, path: str, name: str, limit_bytes: int | None = None) -> bytes | None:
        return read_bounded(path, name, most_bytes(name) if limit_bytes is None else limit_bytes)

    def put(self, path: str, name: str, data: bytes) -> None:
        self._put_held(path, name, data).close()
        sync_directory(path)

    def claim(self, path: str, name: str, data: bytes) -> Claim:
        contested = is_locked(os.path.join(path, name))
        return Claim(self._put_held(path, name, data), contested)

    def release(self, path: str, name: str, beginning: bytes) -> None:
        file = os.path.join(path, name)
        if not (self.read(path, name) or b"").startswith(beginning):
            return
        taken = hidden_names.make(hidden_names.TEMPORARY, path, name)
        try:
            os.rename(file, taken)
            if not (self.read(*os.path.split(taken)) or b"").startswith(beginning):
                with contextlib.suppress(FileExistsError):  # unless a third one has claimed it
                    link_new(taken, file)  # of a writer who claimed it since the first look
        finally:
            remove(taken)

    def _put_held(self, path: str, name: str, data: bytes) -> LockFile:
        """Atomically writes a file and returns it, open and with a shared lock."""
        if WINDOWS:
            raise cannot_write(path)
        # Durable, because a later save syncs only the directories that it creates itself.
        make_directories(path, durable=True)
        temporary = hidden_names.make(hidden_names.TEMPORARY, path, name)
        file: LockFile | None = None
        try:
            # O_RDWR: NFS wants the file open for reading for a shared lock.
            file = LockFile(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            file.lock(SHARED)
            assert file.descriptor is not None
            with open(file.descriptor, "wb", closefd=False) as stream:
                stream.write(data)
            sync_file(file.descriptor)
            os.replace(temporary, os.path.join(path, name))
        except BaseException:  # also an interrupt by a signal handler
            if file is not None:
                file.close()
            remove(temporary)
            raise
        return file

    def reading(self, path: str, head: bytes) -> contextlib.AbstractContextManager[None]:
        return reading(os.path.join(path, SIGNS[0]), head)

    def files(self, path: str, known_bytes: Mapping[str, int] | None = None) -> dict[str, int]:
        return file_sizes(path)

    def size(self, path: str, name: str) -> int | None:
        return size_of(os.path.join(path, name))

    def remove(self, path: str, name: str) -> None:
        file = os.path.join(path, name)
        if self.exists(file):
            if WINDOWS:
                raise cannot_write(path)
            remove(file)
            sync_directory(path)

    def exists(self, path: str) -> bool:
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno in ABSENT:
                return False
            raise
        return True

    def look(self, path: str) -> Look:
        found, hidden = list[str](), frozenset[str]()
        for _ in range(_LOOKS):
            try:
                changed = os.stat(path).st_mtime_ns
                with os.scandir(path) as entries:
                    inside = list(entries)
                found = [
                    one.name
                    for one in inside
                    if one.name[0] != "."
                    and (one.is_dir() or (one.is_symlink() and not os.path.exists(one.path)))
                ]
                hidden = frozenset(one.name for one in inside if one.name[0] == ".")
                if any(name.startswith(hidden_names.REPLACED) for name in hidden):
                    found += hidden_names.interrupted(path).keys() - set(found)
                # a listing is not one moment: what is renamed meanwhile may be in it under neither name
                if os.stat(path).st_mtime_ns == changed:
                    break
            except (FileNotFoundError, NotADirectoryError):
                return Look([], lambda _: False, frozenset())
        return Look(found, lambda name: self.is_checkpoint(f"{path}/{name}"), hidden)

    def is_checkpoint(self, path: str) -> bool:
        record = os.path.join(path, SIGNS[0])
        for _ in range(_LOOKS):
            if os.path.exists(record):
                return True
            try:
                inside = os.listdir(path)
            except (FileNotFoundError, NotADirectoryError):
                if os.path.islink(
                    path
                ):  # to a disk that is not mounted: who opens it gets the error
                    return True
                inside = []
            except PermissionError:  # what cannot be read is not absent, either
                return True
            if not inside and hidden_names.replaced(path) is not None:
                return True
            if any(name in SIGNS or _is_item(f"{path}/{name}") for name in inside):
                return True
            # The look may have gone into a directory that is replaced, and being deleted: a second one does not.
            if os.path.exists(record):
                return True
            if inside:
                break  # else it is gone, or replaced once more just now
        return False

    def delete(self, path: str, trash: str | None = None) -> None:
        if WINDOWS:
            raise cannot_write(path)
        parent, name = os.path.split(path)
        standing = self.replaced(path) or path
        if os.path.isdir(standing) and not os.access(standing, os.W_OK):
            raise PermissionError(errno.EACCES, why_immovable(standing), standing)
        gone = hidden_names.make(hidden_names.TEMPORARY, parent, name)
        if trash is not None:
            gone = os.path.join(parent, trash, name)
            os.makedirs(os.path.dirname(gone), exist_ok=True)
            if os.path.lexists(gone):
                kept = hidden_names.shortened(name, _MOST_TRASH_NAME_BYTES)
                gone = os.path.join(parent, trash, f"{kept}.{secrets.token_hex(4)}")
        try:
            with deleting(os.path.join(standing, SIGNS[0])):
                # First delete what this checkpoint replaced, else `replaced` would bring it back.
                old = _superseded(parent, hidden_names.of(parent, name), standing)
                if old:
                    sync_directory(parent)
                    hidden_names.discard(old)
                os.rename(standing, gone)
            if trash is None:
                os.unlink(gone) if os.path.islink(gone) else shutil.rmtree(gone)
        except BaseException:
            if trash is None:
                remove(gone)  # after the rename the deletion is irrevocable: try to finish it
            raise

    def garbage(self, path: str) -> list[str]:
        return hidden_names.removable(path)

    def clean(self, path: str) -> list[str]:
        if WINDOWS:
            return []
        hidden_names.bring_back(path)
        entries = hidden_names.removable(path)
        if not entries or not is_synced(path):
            return []
        hidden_names.discard(os.path.join(path, entry) for entry in entries)
        return entries

    def replaced(self, path: str) -> str | None:
        if os.path.lexists(os.path.join(path, SIGNS[0])):  # the common case, without a listing
            return None
        return hidden_names.replaced(path)


def _clean_named(parent: str, beside: list[hidden_names.Hidden]) -> list[str]:
    """Deletes what dead attempts left; returns old checkpoints to delete after the commit."""
    found = [(hidden, os.path.join(parent, hidden.entry)) for hidden in beside]
    dead = [
        path
        for hidden, path in found
        if hidden.kind == hidden_names.TEMPORARY and is_dead(hidden.owner, path)
    ]
    # first the fsync: one of them may be a checkpoint that was replaced by a rename that is not durable yet
    if dead and is_synced(parent):
        hidden_names.discard(dead)
    return _superseded(parent, beside)


def _superseded(parent: str, beside: list[hidden_names.Hidden], but: str = "") -> list[str]:
    """Paths of replaced checkpoints, except ``but``."""
    paths = [
        os.path.join(parent, hidden.entry)
        for hidden in beside
        if hidden.kind != hidden_names.TEMPORARY
    ]
    return [path for path in paths if path != but and os.path.lexists(path)]


def why_immovable(path: str) -> str:
    """Whose directory it is, if this process may not write in it: it can neither move it, nor delete what is in it, nor move
    something into it. Empty if it may, or if there is none.
    """
    if not os.path.isdir(path) or os.access(path, os.W_OK):
        return ""
    return (
        f"{path} belongs to user {os.lstat(path).st_uid}, and this process may not write in it, so it moves and deletes nothing "
        f"there: its owner allows that by chmod -R g+w {shlex.quote(os.path.dirname(path))}"
    )
