"""Files of a caller: what lies below a path and is to be saved, files written for it, and the secret of its job."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
import tempfile
import weakref
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from ckpt_core._directory import files, hidden_names
from ckpt_core._directory.owner import lives, this_owner
from ckpt_core._errors import CheckpointError, UnsupportedLeaf
from ckpt_core._platform import BINARY, NO_LINK, READ, WINDOWS

_RESERVED = (".attempt.", ".ckpt-put.")
"""Beginnings of names of attempts in object stores, and of halves of files in mounted ones."""
_SCRATCH = "ckpt-files-"
SECRET_FILE = ".ckpt-secret"
_MADE_BYTES = 32
_LEAST_BYTES, _MOST_BYTES = 16, 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class SourceFile:
    """A file to save, as it was when it was found."""

    name: str  # relative path, with ``/`` between names
    path: str
    size_bytes: int
    identity: files.FileIdentity


def files_below(path: str) -> list[SourceFile]:
    """The file at ``path``, or all files below the directory there, ordered by name; links are followed. Raises
    UnsupportedLeaf if something is no file, a link leads nowhere or in a circle, or a name is reserved or no UTF-8.
    """
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        return [_source(os.path.basename(path), path)]
    return sorted(_gather(path, "", [status]), key=lambda file: file.name)


def _gather(directory: str, folder: str, around: list[os.stat_result]) -> Iterator[SourceFile]:
    with os.scandir(directory) as entries:
        listed = list(entries)
    for entry in listed:
        name = f"{folder}{entry.name}"
        try:
            status = entry.stat()
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _refused(name, entry.path, "a link that leads in a circle") from error
            if isinstance(error, FileNotFoundError) and entry.is_symlink():
                raise _refused(name, entry.path, "a link that leads nowhere") from error
            raise
        if not stat.S_ISDIR(status.st_mode):
            yield _source(name, entry.path)
        elif any(os.path.samestat(status, one) for one in around):
            raise _refused(name, entry.path, "a link to a directory that it lies in")
        else:
            yield from _gather(entry.path, f"{name}/", [*around, status])


def _source(name: str, path: str) -> SourceFile:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise _refused(name, path, "no regular file (a pipe, a device or a socket)")
    base = name.rpartition("/")[2]
    if any("\udc80" <= character <= "\udcff" for character in name):
        raise _refused(name, path, "a file whose name is no UTF-8")
    if base.startswith(_RESERVED):
        begin = ".".join(base.split(".")[:2]) + "."
        raise _refused(name, path, f"a file whose name begins with {begin!r}, as ckpt's own do")
    return SourceFile(name, path, status.st_size, files.identity_of(status))


def _refused(name: str, path: str, what: str) -> UnsupportedLeaf:
    return UnsupportedLeaf(
        f"{path!r} is {what}: Files saves regular files and what links lead to; leave it out, by a "
        "function that copies the others, for example",
        leaf=name,
        type_name="file",
    )


def pieces_of(source: SourceFile) -> Iterator[bytes]:
    """The content, 4 MiB at a time; CheckpointError if the file has changed since it was found, or holds more than its size."""

    def refuse_changed(status: os.stat_result) -> None:
        if files.identity_of(status) != source.identity:
            raise CheckpointError(
                f"{source.path} changed while it was being saved: let a save of such files end before they change "
                "(pending.result(), wait_until_finished())"
            )

    done = 0
    for piece in files.read_pieces(*os.path.split(source.path), source.size_bytes, refuse_changed):
        done += len(piece)
        if done <= source.size_bytes:
            yield piece
    if done > source.size_bytes:  # in /proc and in some mounts, sizes are not the real ones
        raise CheckpointError(
            f"{source.path} holds more than the {source.size_bytes} bytes of its size: save a copy of it"
        )


def place(path: str, pieces: Iterable[bytes]) -> None:
    """Writes a file that appears whole, in place of what was there, when ``pieces`` has ended."""
    with placed(path) as temporary, open(temporary, "xb") as file:
        file.writelines(pieces)


@contextlib.contextmanager
def placed(path: str) -> Generator[str]:
    """Where to write a file, which appears whole at ``path`` in the end, in place of what was there."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = os.path.join(os.path.dirname(path), f".ckpt-{secrets.token_hex(8)}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        files.remove(temporary)
        raise


class Scratch:
    """An empty directory for what a caller writes; deleted when each of its ``users`` has closed it, or with this object."""

    def __init__(self, users: int = 1) -> None:
        _remove_of_the_dead()
        self._users = list(range(users))
        self.path = tempfile.mkdtemp(prefix=f"{_SCRATCH}{this_owner()}.")
        self._remove = weakref.finalize(self, _remove_at_home, self.path, os.getpid())

    def close(self) -> None:
        """Called by each user after its last read; deletes it with all that is in it."""
        if self._users.pop() == 0:
            self._remove()


def _remove_at_home(path: str, home: int) -> None:
    """Deletes a directory, but not in a forked child, which ends while its parent still reads there."""
    if os.getpid() == home:
        files.remove(path)


@functools.cache  # once for each process
def _remove_of_the_dead() -> None:
    """Deletes the directories of processes that were killed on this host."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            owner = entry.name.removeprefix(_SCRATCH).rpartition(".")[0]
            if entry.name.startswith(_SCRATCH) and lives(owner) is False:
                files.remove(entry.path)  # or not, if it is somebody else's


def read_secret(path: str) -> bytes:
    """The bytes of a file; CheckpointError, which says what to do, if others can read it, or if it is too short for a secret."""
    if WINDOWS:
        what = "on Windows nothing tells who may read a file, so no secret is taken from one"
        raise CheckpointError(f"{path}: {what}")
    descriptor = os.open(path, READ | NO_LINK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is no regular file: name one that holds a secret")
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
            raise CheckpointError(
                f"{path} belongs to user {status.st_uid} and has the mode {stat.S_IMODE(status.st_mode):o}, so that "
                f"others may read the secret in it: it must belong to user {os.geteuid()} (chmod 600 {path})"
            )
        found = os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)
    if len(found) < _LEAST_BYTES:
        raise CheckpointError(
            f"{path} has {len(found)} bytes, and a secret has {_LEAST_BYTES} at least: "
            f"head -c {_MADE_BYTES} /dev/urandom > {path}"
        )
    return found


def make_secret(directory: str) -> str:
    """Path of the secret in a directory, which is made if there is none; whole at every moment, and never public."""
    path = os.path.join(directory, SECRET_FILE)
    if os.path.lexists(path):
        return path
    temporary = hidden_names.make(hidden_names.TEMPORARY, directory, SECRET_FILE)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_MADE_BYTES))
            file.flush()
            files.sync_file(descriptor)
        with contextlib.suppress(FileExistsError):  # another one was quicker: its secret stays
            files.link_new(temporary, path)
    finally:
        files.remove(temporary)
    return path
