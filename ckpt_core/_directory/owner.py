"""Who a temporary directory belongs to, and whether that process is still alive.

The owner stands in the directory's name: a digest of host, boot and process namespace, the
process id and its start time. No file has to be written for it, and none is left over.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import time

FOREIGN_AGE_SECS = 3600.0
"""A temporary directory of another host is taken for dead when nothing changed in it for this long."""


@functools.cache
def this_owner() -> str:
    """The name part that says: this process."""
    return f"{_host()}-{os.getpid()}-{_start_time(os.getpid())}"


@functools.cache
def _host() -> str:
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id",):
        try:
            with open(path) as file:
                parts.append(file.read().strip())
        except OSError:
            parts.append("")
    try:
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append("")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _start_time(pid: int) -> str:
    """Start time of a process in clock ticks; empty where it does not run or cannot be known."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # the command, in parentheses, may hold anything
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def is_dead(owner: str, path: str) -> bool:
    """Whether the process that a temporary directory at ``path`` is named after has ended."""
    host, _, process = owner.partition("-")
    pid, _, start = process.partition("-")
    if host == _host() and pid.isdigit() and os.path.isdir("/proc/self"):
        return _start_time(int(pid)) != start
    try:
        newest = max(os.stat(entry).st_mtime for entry in _entries(path))
    except OSError:
        return False
    return time.time() - newest > FOREIGN_AGE_SECS


def _entries(path: str) -> list[str]:
    """The path and all below it: a save of hours changes nothing but what lies deepest."""
    found = [path]
    for top, directories, files in os.walk(path):
        found += (os.path.join(top, name) for name in (*directories, *files))
    return found
