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
import tempfile
import time

from ckpt_core._directory.syscalls import boot_id, unless_absent
from ckpt_core._fork import around_forks
from ckpt_core._platform import WINDOWS

FOREIGN_AGE_SECS = 3600.0
_OWNER = re.compile(r"([0-9a-f]+)-([0-9]{1,9})-([0-9]*)")


@functools.cache
def this_owner() -> str:
    """The owner string of this process."""
    return f"{_host()}-{os.getpid()}-{_start_time(os.getpid()) or ''}"


around_forks(after_in_child=this_owner.cache_clear)


def this_machine() -> str:
    """Identifies the machine: equal for all its containers, different after it was started anew."""
    return boot_id() or socket.gethostname()


def this_network() -> str:
    """Identifies the machine and its network namespace, whose processes reach each other by loopback."""
    return f"{this_machine()} {_namespace('net') or socket.gethostname()}"


def introduction() -> str:
    """Process id, host and current time, for messages."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"process {os.getpid()} on {socket.gethostname()}, since {now}"


@functools.cache
def _host() -> str:
    text = f"{socket.gethostname()}\n{boot_id()}\n{_namespace('pid')}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:  # a system without them
        return ""


def _start_time(pid: int) -> str | None:
    """Start time of a process in clock ticks; empty if it is a zombie, None if /proc does not show it (``hidepid``)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The command name, in parentheses, may contain spaces and parentheses.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def lives(owner: str) -> bool | None:
    """Whether the owner is alive; None if it runs on another host or is unknown. Where the system does not say when a
    process started (no /proc), a later one with the owner's id counts as it: what is left is deleted after that.
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
    if WINDOWS:  # where os.kill ends or interrupts the process
        return True if pid == os.getpid() else None
    try:
        os.kill(pid, 0)
    except OSError as error:  # EPERM: the process exists and belongs to another user
        return not isinstance(error, ProcessLookupError)
    return True


def is_dead(owner: str, path: str) -> bool:
    """Whether the owner of the files at ``path`` is dead; of one on another host, whether nothing below ``path`` has changed
    for ``FOREIGN_AGE_SECS`` by the clock of the file system, since that of this host may be wrong.
    """
    living = lives(owner)
    if living is not None:
        return not living
    try:
        newest = os.stat(path).st_mtime
        # a long save may change only the deepest files
        for top, directories, files in os.walk(path, onerror=unless_absent):
            inside = (os.path.join(top, name) for name in (*directories, *files))
            newest = max([newest, *(os.stat(entry).st_mtime for entry in inside)])
        with tempfile.TemporaryFile(dir=os.path.dirname(path), prefix=".ckpt-") as clock:
            return os.fstat(clock.fileno()).st_mtime - newest > FOREIGN_AGE_SECS
    except OSError:
        return False
