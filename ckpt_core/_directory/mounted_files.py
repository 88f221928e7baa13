"""The files of a mounted bucket as keys and values, written without what a mount lacks.

Where gcsfuse, s3fs, rclone and the like mount a bucket, to rename a directory copies every object, or is refused; there
are no locks and no links; a file is in the bucket when it was closed, and an error of the upload comes then.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt_core._directory.files import sync_file, unless_absent
from ckpt_core._errors import naming_file
from ckpt_core._platform import BINARY

_HALF = ".ckpt-put."  # begins the name of a file that is renamed when it is whole
_HALF_SECS = 86_400.0  # age at which such a file is left of a dead writer
_CANNOT = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EPERM, errno.EXDEV})
"""What a mount answers that does not know a call."""
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_TRIES = 20


class MountedFiles:
    """The files below a directory as ``Keys``. A conditional put compares and then writes: two writers may both win."""

    def __init__(self, root: str) -> None:
        self._root = root

    def get(self, key: str, first_bytes: int | None = None) -> bytes | None:
        path = self._path(key)
        with contextlib.suppress(*_NO_FILE), naming_file(path), open(path, "rb") as file:
            return file.read(first_bytes)
        return None

    def get_version(self, key: str) -> tuple[bytes | None, str]:
        """The version is a digest of the value."""
        value = self.get(key)
        return value, "missing" if value is None else hashlib.sha256(value).hexdigest()

    def put(self, key: str, value: bytes) -> None:
        self._write(self._path(key), value)

    def put_all(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self.put(key, value)

    def put_if_unchanged(self, key: str, value: bytes, version: str) -> bool:
        """The file appears whole, if the mount can rename: one uploads what there is of a file when its writer dies."""
        if self.get_version(key)[1] != version:
            return False
        path = self._path(key)
        half = f"{os.path.dirname(path)}/{_HALF}{secrets.token_hex(8)}"
        try:
            self._write(half, value)
            if not _if_it_can(lambda: os.replace(half, path)):
                self._write(path, value)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(half)
        return True

    def list(self, prefix: str = "") -> list[str]:
        found: list[str] = []
        for folder, folders, names in os.walk(self._root, onerror=unless_absent):
            folders.sort()
            for name in sorted(names):
                path = f"{folder}/{name}"
                if not name.startswith(_HALF):
                    found.append(path.removeprefix(f"{self._root}/"))
                    continue
                with contextlib.suppress(OSError):
                    if time.time() - os.stat(path).st_mtime > _HALF_SECS:
                        os.unlink(path)
        return [key for key in found if key.startswith(prefix)]

    def delete(self, keys: Iterable[str]) -> None:
        """Also deletes the directories that become empty, which a bucket does not have."""
        for key in keys:
            path = self._path(key)
            with contextlib.suppress(*_NO_FILE):
                os.unlink(path)
            while len(path) > len(self._root):
                path = os.path.dirname(path)
                try:
                    os.rmdir(path)
                except OSError:
                    break

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _write(self, path: str, value: bytes) -> None:
        with naming_file(path):
            descriptor = _open_for_writing(path)
            try:
                rest = memoryview(value)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                _if_it_can(lambda: sync_file(descriptor))
            finally:
                os.close(descriptor)  # raises if the upload failed


def _open_for_writing(path: str) -> int:
    """The descriptor of a new or emptied file; makes its directory."""
    # not for reading: rclone without a cache refuses that
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY
    tries = itertools.count(1)
    while True:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return os.open(path, flags)
        except (FileNotFoundError, FileExistsError):
            # a deletion that goes on may remove the directory when it is empty, at any moment
            if next(tries) == _TRIES:
                raise


def _if_it_can(call: Callable[[], Any]) -> bool:
    """Makes a system call; False if the mount does not know it."""
    try:
        call()
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True
