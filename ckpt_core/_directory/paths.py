"""What a path means that a caller gives: a directory, an object store, or a bucket that is mounted as a directory; and the
signs by which a checkpoint there is known.

Of mounts only Linux is asked. Elsewhere, and where /proc is hidden, a mounted bucket is taken for a disk: its directories
are not renamed at once, but copied file by file, so a save is not atomic there.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from typing import NamedTuple

from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    RefusedArgument,
)
from ckpt_core._platform import WINDOWS, of_tasks

_REMOTE = ("memory://", "s3://", "gs://")
_ONE_SLASH = re.compile(r"(memory|s3|gs|gcs|file|https?|hdfs|abfss?|az):/(?!/)")
MOUNTS = "/proc/self/mountinfo"
_BUCKETS = re.compile(
    r"blobfuse2?|drive|gcsfuse|geesefs|goofys|mount-s3|mountpoint-s3|ossfs|rclone|s3fs"
)
"""Programs that mount buckets; ``drive`` is Google Drive in Colab. Others may well rename (sshfs, glusterfs, juicefs): those are
disks to us."""
_LOCAL = re.compile(r"ext[234]|xfs|btrfs|zfs|f2fs|bcachefs|tmpfs|ramfs|overlay|squashfs|erofs")
"""File systems that no other machine can change; ``overlay`` is that of containers."""
_ESCAPE = re.compile(r"\\([0-7]{3})")  # such as a space in a mount point, as the kernel writes it
_ENDLESS_BYTES = 2**50  # the size of a bucket, all of it free, as gcsfuse and the like report it


def resolve(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Absolute path or URL, without a trailing slash, and whether it is a directory of a file system; a mounted bucket is
    an object store. A later ``chdir`` has no effect. TypeError or RefusedArgument for what cannot be a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            "the path of a checkpoint must be a str or an os.PathLike object, got a "
            f"{type(path).__name__}: the path comes first, as in save(path, state) and "
            "load(path, like)"
        )
    text = os.fspath(path)
    if not text:
        raise RefusedArgument("the path of a checkpoint must not be empty")
    try:
        if b"\0" in os.fsencode(text):
            raise RefusedArgument(f"{text!r}: no path can hold a zero byte")
    except UnicodeEncodeError:
        what = "a lone surrogate, which has no encoding"
        raise RefusedArgument(f"{text!r}: no path can hold {what}") from None
    if text.startswith(_REMOTE):
        scheme, _, rest = text.partition("://")
        if not rest.strip("/") or (rest.startswith("/") and scheme != "memory"):
            key = rest.strip("/") or "PATH"
            raise RefusedArgument(f"{text} names no bucket: write {scheme}://BUCKET/{key}")
        return text.rstrip("/"), False
    scheme, separator, _ = text.partition("://")
    if separator and scheme.isalnum():
        raise RefusedArgument(f"{text}: only {', '.join(_REMOTE)} and local paths are supported")
    shortened = _ONE_SLASH.match(text)
    if shortened is not None:
        rest = text[shortened.end() :]
        root = f"{shortened[1]}://"
        raise RefusedArgument(
            f"{text!r} is a URL that lost a slash, as in a pathlib.Path, and would be a local folder called "
            f"{shortened[1]}: write {root if root in _REMOTE else '/'}{rest}, as text (or ./{text} for that folder)"
        )
    where = os.path.abspath(os.path.expanduser(text))
    if WINDOWS:
        where = where.replace("\\", "/")
    elif "\\" in where:
        raise RefusedArgument(
            f"{where!r}: a path must not hold a backslash, which TensorStore takes for a slash: its arrays would "
            "be written into other directories. Use another path"
        )
    return where, mounted_bucket(where) is None


def refuse_lost_link(path: str) -> None:
    """A run below a link that leads nowhere, such as to a disk that is not mounted, would begin anew at step 0."""
    place = path
    while not os.path.lexists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    if os.path.islink(place) and not os.path.exists(place):
        raise CheckpointNotFound(
            f"{place} is a link to {os.readlink(place)}, which is not there: mount or make that, or remove it"
        )


def refuse_path(path: str) -> None:
    """Raises CheckpointError if TensorStore cannot take a path of a file system, since it is not valid UTF-8."""
    if any("\udc80" <= character <= "\udcff" for character in path):
        raise CheckpointError(
            f"{path!r} is no UTF-8, and TensorStore, which reads compressed arrays, takes no other paths: give the "
            "directory another name"
        )


def _mount_of(path: str) -> tuple[str, str]:
    """Type and source of the mount in which a path lies or will lie, as the kernel names them; empty if they are not known."""
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
        path = os.path.realpath(path)
    except OSError:
        return "", ""
    longest, found = -1, ("", "")
    for line in lines:  # proc_pid_mountinfo(5); of two at one place, the later hides the earlier
        fields, _, rest = line.partition(" - ")
        point = _ESCAPE.sub(lambda one: chr(int(one[1], 8)), (fields.split(" ") + [""] * 5)[4])
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= longest:
            kind, _, source = rest.partition(" ")
            longest, found = len(point), (kind, source.partition(" ")[0])
    return found


def file_system_of(path: str) -> str:
    """The type of the file system that holds a path, as the kernel names it; empty where it cannot be known."""
    return _mount_of(path)[0]


def is_local_disk(path: str) -> bool:
    """Whether a path is on a local file system: no other machine truncates a file there, which kills who has it mapped (SIGBUS)."""
    return _LOCAL.fullmatch(_mount_of(path)[0]) is not None


def mounted_bucket(path: str) -> str | None:
    """The program that mounts the bucket in which an absolute path lies or will be made; None for any other file system."""
    kind, source = _mount_of(path)
    if not kind.startswith("fuse"):
        return None
    # s3fs is ``fuse.s3fs s3fs``, rclone ``fuse.rclone remote:bucket``, mountpoint-s3 ``fuse mountpoint-s3``
    for name in (kind.partition(".")[2], source):
        if _BUCKETS.fullmatch(name):
            return name
    # Kubernetes' drivers mount as ``fuse BUCKET``, which names no program
    return "FUSE" if kind == "fuse" and _has_no_end(path) else None


def _has_no_end(path: str) -> bool:
    """Whether the file system of a path says that it is huge and empty."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    with contextlib.suppress(OSError):
        status = os.statvfs(path)
        is_huge = status.f_blocks * status.f_frsize >= _ENDLESS_BYTES
        return is_huge and status.f_bfree == status.f_blocks
    return False


SIGNS = ("ckpt.json", "_CHECKPOINT_METADATA", "_METADATA", "orbax.checkpoint", "commit_success.txt")
"""File names that mark a directory as a checkpoint; one of them is enough to read it as one."""
_STEP_KEYS = (b'"item_handlers"', b'"init_timestamp_nsecs"', b'"custom_metadata"')
_KEYS = {"_CHECKPOINT_METADATA": _STEP_KEYS, "_METADATA": (b'"tree_metadata"',)}


def has_sign(path: str) -> bool:
    """Whether a directory contains one of ``SIGNS``, and so is a checkpoint."""
    return any(os.path.exists(os.path.join(path, sign)) for sign in SIGNS)


def is_meant(read: Callable[[str], bytes | None]) -> bool:
    """Whether the content of a file shows that this is a checkpoint, and no directory of somebody else's ``ckpt.json``."""
    for name in SIGNS:
        with contextlib.suppress(CheckpointCorrupt):  # one sound file is enough
            data = read(name)
            if data is not None and _fits(name, data):
                return True
    return False


def _fits(name: str, data: bytes) -> bool:
    match name:
        case "ckpt.json":
            return data.startswith(b'{"crc32c":"') and b'"record":{"format_version":' in data[:64]
        case "orbax.checkpoint":  # a map of msgpack, to whoever wrote it
            return bool(data) and (0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF))
        case "commit_success.txt":
            return data.startswith(b"Checkpoint commit was successful")
        case _:
            return data.lstrip().startswith(b"{") and any(key in data for key in _KEYS[name])


def already_there(path: str) -> CheckpointExists:
    """The error of a save to a place that is taken."""
    return CheckpointExists(
        f"{path} exists already: choose another path, or pass overwrite=True to replace it{of_tasks()}"
    )


def lies_inside(path: str, around: str) -> CheckpointExists:
    """The error of a save into another checkpoint."""
    return CheckpointExists(
        f"{path} lies inside the checkpoint {around}, which would no longer be what was saved: choose another path"
    )


class Look(NamedTuple):
    """What one listing of a directory found."""

    children: list[str]  # names of subdirectories that may be checkpoints or items
    is_checkpoint: Callable[[str], bool]  # of ``children``: whether a committed checkpoint is there
    hidden: frozenset[str]  # names that begin with a dot
