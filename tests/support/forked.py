"""Processes that have imported jax and ckpt_core already: children of one interpreter that has, and does nothing else.

A new interpreter imports jax for a second or more, and all of ckpt_core for a fifth of one; a fork takes milliseconds. The
interpreter that forks never uses what it has imported: no thread, no backend, no TensorStore, which a fork would not
survive. Each child runs its code as `python -c` would, and ends as an interpreter ends. Where there is no pidfd (macOS, on
which frameworks do not survive a fork), each child is a new interpreter.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMPORTED = ("numpy", "ml_dtypes", "jax", "jax.numpy", "tensorstore", "crc32c")
READ_AT_IMPORT = ("JAX_", "PYTHON", "KERAS_", "LD_PRELOAD")
SET_IN_CHILDREN: dict[str, Callable[[str], Any]] = {
    "JAX_COMPILATION_CACHE_DIR": str,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": float,
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": int,
}
"""What jax reads at its import and may be told later: such children need no interpreter that forks of their own."""


class Forked:
    """One such process; what it prints goes into a file."""

    def __init__(self, parent: "_Parent", pid: int) -> None:
        self.pid = pid
        self._parent = parent
        self._watch = os.pidfd_open(pid)  # nobody else gets its number before `wait` has asked
        self._code: int | None = None
        self.max_rss_bytes = 0  # known when it has ended

    def wait(self, timeout_secs: float) -> int:
        """Its exit code; negative the signal that ended it; TimeoutError if it still runs."""
        if self._code is None:
            if not select.select([self._watch], [], [], timeout_secs)[0]:
                raise TimeoutError(f"process {self.pid} still runs after {timeout_secs:g} s")
            self._code, self.max_rss_bytes = json.loads(self._parent.ask({"reap": self.pid}))
            os.close(self._watch)
        return self._code

    def wait_until_stopped(self, timeout_secs: float) -> None:
        """Until all its threads stand still, after SIGSTOP; TimeoutError if it runs, or has ended."""
        until = time.monotonic() + timeout_secs
        while (states := self._states()) != {"T"}:
            if "Z" in states or time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} is not stopped: {states}")
            time.sleep(0.002)

    def _states(self) -> set[str]:
        found = set[str]()
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                stat = Path(f"/proc/{self.pid}/task/{thread}/stat").read_text()
                found.add(stat.rpartition(")")[2].split()[0])
        return found

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self._code is None:
            os.kill(self.pid, number)

    def end(self) -> int:
        """Kills it, where it still runs; its exit code."""
        self.send_signal(signal.SIGKILL)
        return self.wait(60)


class Spawned:
    """A new interpreter, with the methods of ``Forked``."""

    max_rss_bytes = 0  # unknown

    def __init__(
        self,
        code: str,
        arguments: tuple[str, ...],
        output: Path,
        errors: Path,
        environment: Mapping[str, str],
        directory: Path,
    ) -> None:
        with output.open("ab") as told, errors.open("ab") as failed:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=failed,
                env=dict(environment),
                cwd=directory,
            )
        self.pid = self._process.pid

    def wait(self, timeout_secs: float) -> int:
        try:
            return self._process.wait(timeout_secs)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"process {self.pid} still runs after {timeout_secs:g} s") from error

    def wait_until_stopped(self, timeout_secs: float) -> None:
        until = time.monotonic() + timeout_secs
        while "T" not in (state := self._state()):
            if not state or "Z" in state or time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} is not stopped: {state!r}")
            time.sleep(0.01)

    def _state(self) -> str:
        asked = ["ps", "-o", "stat=", "-p", str(self.pid)]
        return subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.strip()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        self.send_signal(signal.SIGKILL)
        return self.wait(60)


def start(
    code: str,
    *arguments: str,
    output: Path,
    environment: Mapping[str, str],
    errors: Path | None = None,
    directory: Path | None = None,
    imported: tuple[str, ...] = (),
    fresh: bool = False,
) -> Forked | Spawned:
    """Runs code as `python -c` does, in a process of its own, which works in ``directory`` or where this process does, finds its
    arguments in `sys.argv`, and has no other ``environment``. ``output`` and ``errors`` are files; without ``errors`` both are one.
    Besides jax and ckpt_core it finds ``imported`` imported: each tuple of modules has an interpreter that forks.
    ``fresh``: in a new interpreter.
    """
    at_import = {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and name not in SET_IN_CHILDREN
    }
    for file in (output, errors or output):
        file.write_bytes(b"")
    if fresh or not hasattr(os, "pidfd_open"):
        place = directory or Path.cwd()
        return Spawned(code, arguments, output, errors or output, environment, place)
    parent = _parent_of(tuple(sorted(at_import.items())), imported)
    request = {
        "code": code,
        "arguments": arguments,
        "output": str(output),
        "errors": str(errors or output),
        "environment": dict(environment),
        "directory": str(directory or os.getcwd()),
    }
    return Forked(parent, int(parent.ask(request)))


@dataclass(frozen=True)
class Done:
    """How a process ended, and what it wrote; named as by ``subprocess``."""

    returncode: int
    stdout: str
    stderr: str


def run(
    code: str,
    *arguments: str,
    environment: Mapping[str, str],
    directory: Path | None = None,
    imported: tuple[str, ...] = (),
    timeout_secs: float = 300,
) -> Done:
    """Runs code as `python -c` does, and waits for its end; the arguments are those of ``start``."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        child = start(
            code,
            *arguments,
            output=output,
            errors=errors,
            environment=environment,
            directory=directory,
            imported=imported,
        )
        try:
            returncode = child.wait(timeout_secs)
        finally:
            child.end()
        return Done(returncode, output.read_text(), errors.read_text())


class _Parent:
    """The interpreter that forks, and the two pipes to it."""

    def __init__(self, environment: Mapping[str, str], imported: tuple[str, ...]) -> None:
        code = "from tests.support import forked; forked.main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *imported],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        atexit.register(self.close)
        self._lock = threading.Lock()
        self._answer()

    def ask(self, request: Any) -> str:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the interpreter that forks ended: {self._process.wait(10)}")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@functools.cache
def _parent_of(at_import: tuple[tuple[str, str], ...], imported: tuple[str, ...]) -> _Parent:
    others = {
        name: value for name, value in os.environ.items() if not name.startswith(READ_AT_IMPORT)
    }
    return _Parent(
        others | dict(at_import) | {"OPENBLAS_NUM_THREADS": "1"}, imported
    )  # or numpy starts some


# ---- the other side ----------------------------------------------------------------------------


def main() -> None:
    """Serves requests until its input ends; each child returns from here and runs its code."""
    for name in (*IMPORTED, *sys.argv[1:]):
        importlib.import_module(name)
    core = importlib.import_module("ckpt_core")
    for name in core.__all__:
        getattr(core, name)  # which imports its module
    gc.collect()
    gc.freeze()  # or each child walks through all objects of jax several times: a third of what it takes to begin
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would not survive that"
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            _, status, usage = os.wait4(request["reap"], 0)
            told = [os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024]
            print(json.dumps(told), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(request)
            return
        print(pid, flush=True)
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for name, flags, descriptor in (
        (os.devnull, os.O_RDONLY, 0),
        (request["output"], mode, 1),
        (request["errors"], mode, 2),
    ):
        file = os.open(name, flags, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    for name, read in SET_IN_CHILDREN.items():
        if name in os.environ:
            sys.modules["jax"].config.update(name.lower(), read(os.environ[name]))
    os.chdir(request["directory"])
    sys.argv = ["-c", *request["arguments"]]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    code = compile(request["code"], "<string>", "exec", dont_inherit=True)  # nor our `annotations`
    exec(code, module.__dict__)
