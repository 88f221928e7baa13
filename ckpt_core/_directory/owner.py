"""Who a hidden directory or a claim belongs to, and whether that process still lives.

The owner stands in the directory's name, or in the file that makes the claim: a digest of host, boot
and process namespace, the process id and its start time.
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
"""What belongs to an unknown process is taken for left behind when nothing changed in it for so long."""
_OWNER = re.compile(r"([0-9a-f]+)-([0-9]{1,9})-([0-9]*)")


@functools.cache
def this_owner() -> str:
    """The name part that says: this process."""
    return f"{_host()}-{os.getpid()}-{_start_time(os.getpid()) or ''}"


os.register_at_fork(after_in_child=this_owner.cache_clear)


def introduction() -> str:
    """This process in words, and the time."""
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
    """Start time of a process in clock ticks; empty where it has ended, None where /proc says nothing.

    With ``hidepid`` the processes of other users are not there at all.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            # the command, in parentheses, may hold anything
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def lives(owner: str) -> bool | None:
    """Whether a process still runs; None where that cannot be known, as it is elsewhere.

    On this host a process is taken for ended only where there is none of its number, or where that
    one is known to have started at another time.
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
    except OSError:  # EPERM: there is one, of another user
        return True
    return True


def is_dead(owner: str, path: str) -> bool:
    """Whether the process that what lies at ``path`` belongs to has ended, as far as can be known.

    Of a process elsewhere that is guessed: where nothing has changed below ``path`` for long.
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
    """The path and all below it: a save of hours changes nothing but what lies deepest."""
    found = [path]
    for top, directories, files in os.walk(path, onerror=unless_absent):
        found += (os.path.join(top, name) for name in (*directories, *files))
    return found
