"""A secret in a file that only the user of a job can read: given by the user, or made beside the steps."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat

from ckpt_core._directory import hidden_names
from ckpt_core._directory.syscalls import link_new, remove, sync_file
from ckpt_core._errors import CheckpointError
from ckpt_core._platform import BINARY, NO_LINK, READ, WINDOWS

SECRET_FILE = ".ckpt-secret"
_MADE_BYTES = 32
_LEAST_BYTES, _MOST_BYTES = 16, 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_secret(path: str) -> bytes:
    """The bytes of a file, if nobody but this user can read or change it. Raises CheckpointError, which says what to
    do, if others can, or if it is too short to be a secret.
    """
    if WINDOWS:
        raise CheckpointError(
            f"{path}: on Windows nothing tells who may read a file, so no secret is taken from one"
        )
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
            sync_file(descriptor)
        with contextlib.suppress(FileExistsError):  # another one was quicker: its secret stays
            link_new(temporary, path)
    finally:
        remove(temporary)
    return path
