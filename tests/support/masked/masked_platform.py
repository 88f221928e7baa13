"""Takes away from this process what another system lacks, as far as ckpt asks for it.

``CKPT_TEST_PLATFORM=portable`` is a POSIX system that is not Linux: macOS, on which F_FULLFSYNC syncs and nothing else
of its own is there. ``windows`` has no POSIX at all: only for a child that reads, after it has imported all else.

What other libraries and the tests themselves use stays: they must work on the Linux that is underneath.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

OURS = ("ckpt_core", "ckpt_flax_nnx", "ckpt_grain", "ckpt_keras", "ckpt_orbax", "ckpt_torchax")
PLATFORM = Path(__file__).parents[3] / "ckpt_core" / "_platform.py"
FOLDERS_OF_LINUX = ("/proc", "/sys/")
LIBRARY_OF_LINUX = frozenset(
    {"fallocate", "prctl", "renameat2", "sched_setattr", "statfs", "statx", "syscall"}
)
OS_OF_LINUX = (
    "O_DIRECT", "O_TMPFILE", "copy_file_range", "eventfd", "memfd_create", "posix_fadvise",
    "posix_fallocate", "sched_getaffinity", "sched_getparam", "sched_getscheduler",
    "sched_setaffinity", "sched_setparam", "sched_setscheduler", "splice",
)  # fmt: skip
OS_OF_POSIX = (
    "O_CLOEXEC", "O_DIRECTORY", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "PRIO_PROCESS",
    "chown", "fchmod", "fork", "fstatvfs", "getegid", "geteuid", "getgid", "getloadavg",
    "getpgid", "getpriority", "getuid", "killpg", "major", "makedev", "minor", "mkfifo", "nice",
    "pread", "preadv", "pwrite", "pwritev", "register_at_fork", "sendfile", "setpriority",
    "statvfs", "sync", "sysconf", "uname", "writev",
)  # fmt: skip
MODULES_OF_POSIX = ("fcntl", "grp", "pwd", "resource", "termios")
SIGNALS_OF_POSIX = (
    "SIGALRM", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGUSR1", "SIGUSR2", "alarm", "pthread_sigmask",
    "setitimer", "sigwait",
)  # fmt: skip
F_FULLFSYNC = 51
READLINK = os.readlink
asked: list[str] = []
"""What ckpt asked for and did not get, or got of macOS; empty unless ``recording``."""
recording = False


def install(name: str) -> None:
    """Masks this process as ``portable`` or ``windows``; ckpt_core must not be imported yet."""
    if name == "portable" and sys.platform != "linux":
        return  # it lacks them by itself
    if "ckpt_core" in sys.modules:
        raise RuntimeError("ckpt_core was imported before the mask of the platform")
    if name not in ("portable", "windows"):
        raise RuntimeError(f"CKPT_TEST_PLATFORM is 'portable' or 'windows', got {name!r}")
    tempfile._O_TMPFILE_WORKS = False  # it has seen that there is one
    _remove(os, OS_OF_LINUX)
    _hide_files()
    _hide_library()
    if name == "windows":
        there = shutil.disk_usage("/")
        shutil.disk_usage = lambda path: there  # Windows has it by another call
        _remove(os, OS_OF_POSIX)
        _remove(signal, SIGNALS_OF_POSIX)
        sys.modules.update(dict.fromkeys(MODULES_OF_POSIX))
        _open_no_folders()
        shutil._use_fd_functions = False
        os.kill = _refuse_to_kill
        _load_platform("win32", "nt")
    else:
        _sync_as_macos()
        _load_platform("darwin", "posix")


def asks() -> bool:
    """Whether a call comes from ckpt, by way of nothing but the standard library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module != __name__ and module not in sys.stdlib_module_names:
            return module in OURS
        frame = frame.f_back
    return False


def _note(what: str) -> None:
    if recording:
        asked.append(what)


def _remove(module: Any, names: Iterable[str]) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _hide_files() -> None:
    def hidden(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and arguments:
            _refuse_hidden(arguments[0])

    @functools.wraps(READLINK)
    def masked(path: Any, *args: Any, **kwargs: Any) -> Any:  # no event tells of it
        _refuse_hidden(path)
        return READLINK(path, *args, **kwargs)

    sys.addaudithook(hidden)
    os.readlink = masked


def _refuse_hidden(path: Any) -> None:
    if not isinstance(path, str | bytes | os.PathLike):
        return
    text = os.fsdecode(path)
    if text.startswith(FOLDERS_OF_LINUX) and asks():
        _note(text)
        raise FileNotFoundError(2, "not on this system", text)


def _hide_library() -> None:
    class Library(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:
            if name in LIBRARY_OF_LINUX and asks():
                _note(name)
                raise AttributeError(name)
            return super().__getattr__(name)

    ctypes.CDLL = Library


def _sync_as_macos() -> None:
    real = fcntl.fcntl

    def masked(descriptor: Any, command: int, argument: Any = 0) -> Any:
        if command != F_FULLFSYNC:
            return real(descriptor, command, argument)
        _note("F_FULLFSYNC " + READLINK(f"/proc/self/fd/{descriptor}"))
        os.fsync(descriptor)
        return 0

    fcntl.F_FULLFSYNC = F_FULLFSYNC
    fcntl.fcntl = masked


def _open_no_folders() -> None:
    real, link = os.open, os.link

    def masked(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if os.path.isdir(path) and asks():
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *args, **kwargs)

    def masked_link(*args: Any, follow_symlinks: bool = True, **kwargs: Any) -> None:
        if not follow_symlinks:
            raise NotImplementedError("link: follow_symlinks unavailable on this platform")
        link(*args, **kwargs)

    os.open, os.link = masked, masked_link


def _refuse_to_kill(pid: int, number: int) -> None:
    raise AssertionError(f"on Windows os.kill({pid}, {number}) ends a process or its console group")


def _load_platform(platform: str, name: str) -> None:
    """Runs the module that asks for the system's name, and gives it that of another one."""
    spec = importlib.util.spec_from_file_location("ckpt_core._platform", PLATFORM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.platform, os.name
    sys.platform, os.name = platform, name
    try:
        spec.loader.exec_module(module)
    finally:
        sys.platform, os.name = before
    sys.modules["ckpt_core._platform"] = module
