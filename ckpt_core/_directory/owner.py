"""Which process owns a hidden directory or a claim, and whether that process is alive.

The owner is written into the directory's name or the claim's file as ``<host>-<pid>-<start>``,
where host is a digest of host name, boot and process namespace, and start is the start time in
clock ticks.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
import time

from ckpt_core._directory.syscalls import unless_absent

FOREIGN_AGE_SECS = 3600.0
"""Age of the last change after which files of a process on another host count as left over."""
_OWNER = re.compile(r"([0-9a-f]+)-([0-9]{1,9})-([0-9]*)")


@functools.cache
def this_owner() -> str:
    """The owner string of this process."""
    return f"{_host()}-{os.getpid()}-{_start_time(os.getpid()) or ''}"


os.register_at_fork(after_in_child=this_owner.cache_clear)


def this_machine() -> str:
    """Identifies the machine: equal for all its containers, different after it was started anew."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()


def this_network() -> str:
    """Identifies the machine and its network namespace, whose processes reach each other by loopback."""
    try:
        return f"{this_machine()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{this_machine()} {socket.gethostname()}"


def introduction() -> str:
    """Process id, host and current time, for messages."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"process {os.getpid()} on {socket.gethostname()}, since {now}"


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


def _start_time(pid: int) -> str | None:
    """Start time of a process in clock ticks; empty if it is a zombie, None if not in /proc.

    With the mount option ``hidepid``, /proc does not show the processes of other users.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The command name, in parentheses, may contain spaces and parentheses.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def lives(owner: str) -> bool | None:
    """Whether the owner is alive; None if it runs on another host or is unknown.

    On this host it counts as dead only if no process has its id, or if that process started at
    another time.
    """
    parts = _OWNER.fullmatch(owner)
    if parts is None or parts[1] != _host() or int(parts[2]) == 0:
        return None
    pid, start = int(parts[2]), parts[3]
    now = _start_time(pid)
    if now == "":
        return False
    if now is not None and start:
        return now == start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # EPERM: the process exists and belongs to another user
        return True
    return True


def is_dead(owner: str, path: str) -> bool:
    """Whether the owner of the files at ``path`` is dead.

    For an owner on another host this is a guess: True if nothing below ``path`` has changed for
    ``FOREIGN_AGE_SECS`` (1 hour).
    """
    living = lives(owner)
    if living is not None:
        return not living
    try:
        newest = max(os.stat(entry).st_mtime for entry in _entries(path))
    except OSError:
        return False
    return time.time() - newest > FOREIGN_AGE_SECS


def _entries(path: str) -> list[str]:
    """The path and everything below it: a long save may change only the deepest files."""
    found = [path]
    for top, directories, files in os.walk(path, onerror=unless_absent):
        found += (os.path.join(top, name) for name in (*directories, *files))
    return found
