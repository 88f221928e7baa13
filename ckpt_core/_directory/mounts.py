"""Whether a path is in a bucket that is mounted as a directory."""

from __future__ import annotations

import os
import sys

MOUNTS = "/proc/self/mountinfo"
_BUCKETS = frozenset(
    {
        "blobfuse",
        "blobfuse2",
        "drive",  # Google Drive in Colab
        "gcsfuse",
        "geesefs",
        "goofys",
        "mount-s3",
        "mountpoint-s3",
        "ossfs",
        "rclone",
        "s3fs",
    }
)
"""Programs that mount buckets. Others may well rename (sshfs, glusterfs, juicefs): those are disks to us."""


def mounted_bucket(path: str) -> str | None:
    """The program that mounts the bucket in which an absolute path lies; None for any other file system.

    Args:
        path: need not exist; what it will be made in decides.
    """
    if not sys.platform.startswith("linux"):
        return None
    device = _device(path)
    if os.major(device):  # a disk; what is no disk has 0
        return None
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            return bucket_program(file.read(), f"{os.major(device)}:{os.minor(device)}")
    except OSError:
        return None


def bucket_program(mounts: str, device: str) -> str | None:
    """The program that mounts a bucket on a device.

    Args:
        mounts: content of ``/proc/self/mountinfo``; its format is in proc_pid_mountinfo(5).
        device: ``major:minor``.
    """
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, source = rest.partition(" ")
        if fields.split(" ")[2:3] != [device] or not kind.startswith("fuse"):
            continue
        # s3fs is ``fuse.s3fs s3fs``, rclone ``fuse.rclone remote:bucket``, mountpoint-s3 ``fuse mountpoint-s3``
        for name in (kind.partition(".")[2], source.partition(" ")[0]):
            if name in _BUCKETS:
                return name
    return None


def _device(path: str) -> int:
    """The device of a path, or of the first directory above it that exists; 1:0 if none can be seen."""
    while True:
        try:
            return os.stat(path).st_dev
        except OSError:
            parent = os.path.dirname(path)
            if parent == path:
                return os.makedev(1, 0)
            path = parent
