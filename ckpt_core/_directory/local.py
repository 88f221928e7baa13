"""Checkpoints in a file system: written under a temporary name, made durable, renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping

from ckpt_core._directory.form import REPLACED_PREFIX, TEMPORARY_PREFIX
from ckpt_core._directory.locks import Claim, deleting, is_locked, lock, reading
from ckpt_core._directory.owner import is_dead, this_owner
from ckpt_core._directory.system import exchange, refuse_special, remove
from ckpt_core._errors import CheckpointExists

_ABORT_TRIES = 100
_ABORT_PAUSE_SECS = 0.02
_SIGNS = (
    "ckpt.json",
    "_CHECKPOINT_METADATA",
    "_METADATA",
    "orbax.checkpoint",
    "commit_success.txt",
)


_REMOTE = ("memory://", "s3://", "gs://")


def resolve(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Absolute path or URL without a slash at its end, and whether it is local.

    Relative paths and ``~`` are resolved now, so a later ``chdir`` changes nothing.
    """
    text = os.fspath(path)
    if not text:
        raise ValueError("the path of a checkpoint must not be empty")
    if text.startswith(_REMOTE):
        return text.rstrip("/"), False
    scheme, separator, _ = text.partition("://")
    if separator and scheme.isalnum():
        raise ValueError(f"{text}: only {', '.join(_REMOTE)} and local paths are supported")
    return os.path.abspath(os.path.expanduser(text)), True


def refuse_file(path: str) -> None:
    """Raise NotADirectoryError where a file lies; a URL never is one."""
    if os.path.exists(path) and not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, "a file is where a directory should be", path)


class LocalForm:
    """Checkpoints as directories; see ``Form``."""

    def begin(self, path: str, *, overwrite: bool, durable: bool, token: str) -> LocalAttempt:
        aside = self.replaced(path)
        if aside is not None:  # a replacement was cut short between its two renames
            os.rename(aside, path)
        _refuse_if_occupied(path, overwrite)
        parent, name = os.path.split(path)
        created = _make_directories(parent, durable)
        temporary = _temporary(parent, name)
        try:
            self._clean_named(parent, name)
            os.mkdir(temporary)
        except OSError:
            _remove_empty(created)
            raise
        return LocalAttempt(path, temporary, overwrite=overwrite, durable=durable, created=created)

    def join(self, path: str, attempt_path: str, *, durable: bool) -> LocalAttempt:
        return LocalAttempt(path, attempt_path, overwrite=False, durable=durable, created=[])

    def read(self, path: str, name: str) -> bytes | None:
        full = os.path.join(path, name)
        try:
            # a pipe would never answer: it is opened without waiting, and then refused
            descriptor = os.open(full, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            if stat.S_ISDIR(mode):
                return None
            refuse_special(mode, full)
        with open(descriptor, "rb") as file:
            return file.read()

    def put(self, path: str, name: str, data: bytes) -> None:
        os.close(self._put_held(path, name, data))

    def claim(self, path: str, name: str, data: bytes) -> Claim:
        contested = is_locked(os.path.join(path, name))
        return Claim(self._put_held(path, name, data), contested)

    def _put_held(self, path: str, name: str, data: bytes) -> int:
        """Writes a file in one step; gives its descriptor, which holds a lock."""
        # a save finds the directories there, and syncs only those that it makes itself
        _make_directories(path, durable=True)
        temporary = _temporary(path, name)
        try:
            # for reading too: a shared lock on NFS takes that
            descriptor = os.open(
                temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
            )
        except OSError:
            remove(temporary)
            raise
        try:
            lock(descriptor, fcntl.LOCK_SH)
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            os.fsync(descriptor)
            os.replace(temporary, os.path.join(path, name))
        except OSError:
            os.close(descriptor)
            remove(temporary)
            raise
        return descriptor

    def reading(self, path: str, head: bytes) -> contextlib.AbstractContextManager[None]:
        return reading(os.path.join(path, _SIGNS[0]), head)

    def files(self, path: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for file in _walk_files(path):
            try:
                status = os.stat(file)
            except FileNotFoundError:  # a link to nowhere
                continue
            refuse_special(status.st_mode, file)
            found[os.path.relpath(file, path)] = status.st_size
        return found

    def children(self, path: str) -> list[str]:
        try:
            with os.scandir(path) as entries:
                return [
                    entry.name
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir()
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def is_checkpoint(self, path: str) -> bool:
        if os.path.exists(os.path.join(path, _SIGNS[0])):
            return True
        try:
            inside = os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return any(sign in inside for sign in _SIGNS) or any(
            os.path.exists(os.path.join(path, name, "_METADATA")) for name in inside
        )

    def delete(self, path: str, trash: str | None = None) -> None:
        parent, name = os.path.split(path)
        hidden = _temporary(parent, name)
        if trash is not None:
            hidden = os.path.join(parent, trash, name)
            os.makedirs(os.path.dirname(hidden), exist_ok=True)
            if os.path.lexists(hidden):
                hidden = f"{hidden}.{secrets.token_hex(4)}"
        with deleting(os.path.join(path, _SIGNS[0])):
            os.rename(path, hidden)
        if trash is None:
            shutil.rmtree(hidden)

    def clean(self, path: str) -> list[str]:
        removed: list[str] = []
        for entry in _hidden(path, TEMPORARY_PREFIX):
            owner = entry.rsplit(".", 2)[-2]
            full = os.path.join(path, entry)
            if is_dead(owner, full):
                remove(full)
                removed.append(entry)
        return removed

    def _clean_named(self, parent: str, name: str) -> None:
        """Removes what dead tries at this very checkpoint left."""
        for entry in _hidden(parent, f"{TEMPORARY_PREFIX}{name[:100]}."):
            full = os.path.join(parent, entry)
            if is_dead(entry.rsplit(".", 2)[-2], full):
                shutil.rmtree(full, ignore_errors=True)
        if os.path.lexists(os.path.join(parent, name)):
            for entry in _hidden(parent, f"{REPLACED_PREFIX}{name}."):
                shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)

    def replaced(self, path: str) -> str | None:
        """Where the old checkpoint stands, if a replacement of ``path`` was cut short."""
        if os.path.lexists(path):
            return None
        parent, name = os.path.split(path)
        found = _hidden(parent, f"{REPLACED_PREFIX}{name}.")
        return os.path.join(parent, found[0]) if found else None


class LocalAttempt:
    """One try; see ``Attempt``."""

    def __init__(
        self, target: str, temporary: str, *, overwrite: bool, durable: bool, created: list[str]
    ) -> None:
        self._target = target
        self._temporary = temporary
        self._overwrite = overwrite
        self._durable = durable
        self._created = created

    @property
    def path(self) -> str:
        return self._temporary

    def write(self, name: str, data: bytes) -> None:
        full = os.path.join(self._temporary, name)
        if "/" in name:
            os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "xb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            if self._durable:
                os.fsync(file.fileno())

    def read(self, name: str) -> bytes:
        with open(os.path.join(self._temporary, name), "rb") as file:
            return file.read()

    def files(self, below: str = "", told: Mapping[str, int] | None = None) -> dict[str, int]:
        return {
            os.path.relpath(file, self._temporary): os.stat(file).st_size
            for file in _walk_files(os.path.join(self._temporary, below))
        }

    def commit(self, record_name: str, record: bytes) -> None:
        if self._durable:
            for directory, _, _ in os.walk(self._temporary, topdown=False):
                if directory != self._temporary:
                    _sync_directory(directory)
        # the record is last: with it the directory is whole, without it there is no checkpoint
        self.write(record_name, record)
        parent = os.path.dirname(self._target)
        if self._durable:
            _sync_directory(self._temporary)
        replaced = self._put_in_place()
        if self._durable:
            _sync_directory(parent)
        if replaced:
            shutil.rmtree(replaced, ignore_errors=True)
        self._created = []

    def _put_in_place(self) -> str | None:
        """Renames into place; gives what was replaced, which may now be removed."""
        if not self._overwrite or not _holds_something(self._target):
            try:
                os.rename(self._temporary, self._target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise _exists(self._target) from error
                raise
            return None
        if exchange(self._temporary, self._target):
            return self._temporary
        parent, name = os.path.split(self._target)
        aside = os.path.join(parent, f"{REPLACED_PREFIX}{name}.{secrets.token_hex(4)}")
        os.rename(self._target, aside)
        try:
            os.rename(self._temporary, self._target)
        except OSError:
            os.rename(aside, self._target)
            raise
        return aside

    def abort(self) -> None:
        # writes that were under way when the first one failed make their directories again
        for _ in range(_ABORT_TRIES):
            shutil.rmtree(self._temporary, ignore_errors=True)
            time.sleep(_ABORT_PAUSE_SECS)
            if not os.path.lexists(self._temporary):
                break
        _remove_empty(self._created)


def _exists(path: str) -> CheckpointExists:
    return CheckpointExists(
        f"{path} exists already: choose another path, or pass overwrite=True to replace it"
    )


def _refuse_if_occupied(path: str, overwrite: bool) -> None:
    if os.path.lexists(path) and not os.path.isdir(path):
        raise CheckpointExists(
            f"{path} is a file: a checkpoint is a directory; choose another path"
        )
    around = path
    while (around := os.path.dirname(around)) != os.path.dirname(around):
        if os.path.exists(os.path.join(around, _SIGNS[0])):
            raise CheckpointExists(
                f"{path} lies inside the checkpoint {around}, which would no longer be what was saved: "
                "choose another path"
            )
    if not _holds_something(path):
        return
    if not overwrite:
        raise _exists(path)
    inside = os.listdir(path)
    if not any(sign in inside for sign in _SIGNS):
        raise CheckpointExists(
            f"{path} is a directory that holds no checkpoint ({', '.join(sorted(inside)[:5])}): "
            "overwrite=True replaces checkpoints only"
        )


def _holds_something(path: str) -> bool:
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is not None
    except (FileNotFoundError, NotADirectoryError):
        return False


def _make_directories(path: str, durable: bool) -> list[str]:
    """Makes missing parents; gives those that were made, deepest first."""
    missing: list[str] = []
    current = path
    while not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    try:
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            if not os.path.isdir(directory):
                raise NotADirectoryError(
                    errno.ENOTDIR, "a file is where a directory should be", directory
                )
            if durable:
                _sync_directory(os.path.dirname(directory))
    except OSError:
        _remove_empty(missing)
        raise
    return missing


def _remove_empty(directories: list[str]) -> None:
    for directory in directories:
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot, and say so like this
            raise
    finally:
        os.close(descriptor)


def _walk_files(path: str) -> Iterator[str]:
    for directory, _, names in os.walk(path):
        for name in names:
            yield os.path.join(directory, name)


def _temporary(parent: str, name: str) -> str:
    """A name beside ``name`` that no other attempt has, and that says whose it is."""
    unique = f"{this_owner()}.{secrets.token_hex(4)}"
    return os.path.join(parent, f"{TEMPORARY_PREFIX}{name[:100]}.{unique}")


def _hidden(path: str, prefix: str) -> list[str]:
    try:
        return [name for name in os.listdir(path) if name.startswith(prefix)]
    except (FileNotFoundError, NotADirectoryError):
        return []
