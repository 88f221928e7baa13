"""Runs functions in child processes under the shim, and says what became of them.

    with Nursery(tmp_path, shim=build_shim(tmp_path)) as nursery:
        outcome = nursery.run("scenarios:save_new", [str(root)], path=str(root),
                              fault=Fault("kill", nth=7))
        outcome.was_killed, outcome.events, outcome.ops

Every wait is bounded, and a process is only ever ended by its own process id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
_START_SECS = 60

T = TypeVar("T")
R = TypeVar("R")


class Unavailable(Exception):
    """This machine lacks what the tests need; the text is a reason to skip."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is to go wrong: the action of the shim, the number of the operation, which count."""

    action: str = "log"
    nth: int = 0
    ops: str = ""


@dataclasses.dataclass(frozen=True)
class Op:
    """One counted file operation of a child."""

    number: int
    name: str
    path: str
    written_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.number} {self.name} {self.path}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a child ended, what it reported before, and the operations that the shim counted."""

    exit_code: int
    timed_out: bool
    max_rss_bytes: int
    secs: float
    events: list[dict[str, Any]]
    ops: list[Op]
    output: str

    @property
    def was_killed(self) -> bool:
        return self.exit_code == -signal.SIGKILL and not self.timed_out

    @property
    def died(self) -> bool:
        """Whether a signal ended the child, a time limit included."""
        return self.exit_code < 0

    def reported(self, key: str) -> list[Any]:
        """All values that the child reported under `key`, in order."""
        return [event[key] for event in self.events if key in event]

    def split(self, mark: str) -> tuple[Outcome, Outcome] | None:
        """A finished job and the one after it, where the child reported `mark` in between."""
        for index, event in enumerate(self.events):
            if mark in event:
                first = dataclasses.replace(self, exit_code=0, ops=[], events=self.events[:index])
                return first, dataclasses.replace(self, events=self.events[index + 1 :])
        return None

    def __str__(self) -> str:
        last = self.ops[-1] if self.ops else "no operation"
        struck = {str(op) for op in self.ops if op.number in self.reported("struck")}
        return (
            f"exit code {self.exit_code}{' (time limit)' if self.timed_out else ''}; "
            f"struck: {struck or 'none'}; last counted: {last}; "
            f"reported: {self.events}; output: {self.output[-2000:]}"
        )


def build_shim(directory: Path) -> Path:
    """Compiles the shim into `directory` and returns its path."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        raise Unavailable("the preload shim needs Linux and a C compiler")
    target = directory / "shim.so"
    command = [compiler, "-O2", "-Wall", "-Wextra", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]
    done = subprocess.run(
        [*command, "-o", str(target), str(HERE / "shim.c"), "-ldl"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise Unavailable(f"the preload shim does not compile: {done.stderr[-500:]}")
    return target


def environment(shim: Path | None) -> dict[str, str]:
    """The environment of a child: one thread for BLAS (a fork needs that), the shim preloaded."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("FAULT_")}
    env["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(HERE), str(REPOSITORY), env.get("PYTHONPATH")) if part
    )
    env["OPENBLAS_NUM_THREADS"] = "1"
    env["JAX_PLATFORMS"] = "cpu"
    env["PYTHONUNBUFFERED"] = "1"
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # or every child compiles ckpt_core anew
    if shim is not None:
        env["LD_PRELOAD"] = str(shim)
    return env


class Nursery:
    """One warmed process that forks a child for each `run`; not for use by two threads at once."""

    def __init__(self, directory: Path, *, shim: Path | None = None) -> None:
        self._directory = directory
        self._shim = shim
        self._numbers = itertools.count()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Nursery:
        self.start()
        self.wait_until_ready()
        return self

    def start(self) -> None:
        """Starts the process, which then takes a second to be ready."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(self._shim),
        )

    def wait_until_ready(self) -> None:
        """Waits until requests can be taken."""
        ready = self._answer(_START_SECS)
        if ready["threads"] != 1:
            raise RuntimeError(f"the nursery runs {ready['threads']} threads, so it cannot fork")

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin and process.stdout
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        process.stdout.close()

    def run(
        self,
        function: str,
        args: Sequence[Any] = (),
        *,
        path: str = "",
        fault: Fault = Fault(),
        timeout_secs: float = 60,
        limits: dict[str, int] | None = None,
        fresh: bool = False,
    ) -> Outcome:
        """Runs `"module:function"` with `args` (JSON) in a child.

        `path` is the text that a path must contain to count; `limits` are resource limits by name
        (`{"RLIMIT_AS": 2**32}`); `fresh=True` takes a new interpreter instead of a fork.
        """
        module, _, name = function.partition(":")
        scratch = self._directory / f"child-{next(self._numbers)}"
        scratch.mkdir()
        request = {
            "module": module,
            "function": name,
            "args": list(args),
            "path": path,
            "fault": dataclasses.asdict(fault),
            "timeout_secs": timeout_secs,
            "limits": limits or {},
            "events": str(scratch / "events"),
            "output": str(scratch / "output"),
            "log": str(scratch / "ops"),
        }
        ended = self._run_fresh(request) if fresh else self._fork(request)
        outcome = Outcome(
            **ended,
            events=[json.loads(line) for line in _lines(scratch / "events")],
            ops=[_op(line) for line in _lines(scratch / "ops")],
            output="\n".join(_lines(scratch / "output")),
        )
        shutil.rmtree(scratch)
        return outcome

    def _fork(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer(request["timeout_secs"] + 30)

    def _answer(self, timeout_secs: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        # Answers are single lines, one for each request, so nothing is left in the text buffer.
        if not select.select([self._process.stdout], [], [], timeout_secs)[0]:
            self._process.kill()
            raise TimeoutError(f"the nursery did not answer within {timeout_secs} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the nursery ended with code {self._process.wait(10)}")
        return json.loads(line)

    def _run_fresh(self, request: dict[str, Any]) -> dict[str, Any]:
        file = Path(request["events"]).with_name("request")
        file.write_text(json.dumps(request))
        process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py"), "--once", str(file)],
            env=environment(self._shim),
        )
        timed_out = False
        try:
            process.wait(request["timeout_secs"])
        except subprocess.TimeoutExpired:
            timed_out = True
            process.kill()
            process.wait(10)
        code = process.returncode
        return {"exit_code": code, "timed_out": timed_out, "max_rss_bytes": 0, "secs": 0.0}


class Pool:
    """Several nurseries that work through a list of jobs side by side, in order of the list."""

    def __init__(self, directory: Path, *, shim: Path | None = None, size: int = 2) -> None:
        self._stack = contextlib.ExitStack()
        self._free: queue.SimpleQueue[Nursery] = queue.SimpleQueue()
        self._nurseries = [Nursery(directory / f"nursery-{i}", shim=shim) for i in range(size)]

    def __enter__(self) -> Pool:
        with contextlib.ExitStack() as stack:
            for nursery in self._nurseries:
                stack.callback(nursery.stop)
                nursery.start()
            for nursery in self._nurseries:
                nursery.wait_until_ready()
                self._free.put(nursery)
            self._threads = stack.enter_context(ThreadPoolExecutor(len(self._nurseries)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def run(self, *args: Any, **kwargs: Any) -> Outcome:
        """One run on a free nursery; see `Nursery.run`."""
        return self._lend(lambda nursery: nursery.run(*args, **kwargs))

    def map(self, job: Callable[[Nursery, T], R], values: Iterable[T]) -> Iterator[R]:
        """`job(nursery, value)` for each value, as many at once as there are nurseries."""
        return self._threads.map(lambda value: self._lend(lambda n: job(n, value)), values)

    def _lend(self, job: Callable[[Nursery], R]) -> R:
        nursery = self._free.get(timeout=600)
        try:
            return job(nursery)
        finally:
            self._free.put(nursery)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _op(line: str) -> Op:
    number, name, written, path = line.split(" ", 3)
    return Op(int(number), name, path, int(written))
