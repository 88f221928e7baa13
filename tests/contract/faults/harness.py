"""Runs functions in child processes under the shim, and says what became of them.

    children = Children(tmp_path, shim=build_shim(tmp_path))
    outcome = children.run("scenarios:save", ["new", str(root)], path=str(root), fault=Fault("kill", nth=7))
    outcome.was_killed, outcome.events, outcome.ops

Every wait is bounded, and a process is only ever ended by its own process id.
"""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tests.support import forked

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
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
    events: list[dict[str, Any]]
    ops: list[Op]
    output: str

    @property
    def was_killed(self) -> bool:
        return self.exit_code == -signal.SIGKILL and not self.timed_out

    def reported(self, key: str) -> list[Any]:
        """All values that the child reported under `key`, in order."""
        return [event[key] for event in self.events if key in event]

    def split(self, mark: str) -> "tuple[Outcome, Outcome] | None":
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


@functools.cache
def build_shim(directory: Path) -> Path:
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
    env = {key: value for key, value in os.environ.items() if not key.startswith("FAULT_")}
    env["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(HERE), str(REPOSITORY), env.get("PYTHONPATH")) if part
    )
    env["JAX_PLATFORMS"] = "cpu"
    env["PYTHONUNBUFFERED"] = "1"
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # or every child compiles ckpt_core anew
    if shim is not None:
        env["LD_PRELOAD"] = str(shim)
    return env


RUN = "import child; child.main()"
"""What a child runs; its argument is a request."""


def request_of(
    function: str,
    args: Sequence[Any],
    scratch: Path,
    *,
    path: str = "",
    fault: Fault = Fault(),
    limits: dict[str, int] | None = None,
) -> str:
    """What tells a child what to do; `events` and `ops` in `scratch` are its reports and the log of the shim."""
    return json.dumps(
        {
            "function": function,
            "args": list(args),
            "path": path,
            "fault": dataclasses.asdict(fault),
            "limits": limits or {},
            "events": str(scratch / "events"),
            "log": str(scratch / "ops"),
        }
    )


class Children:
    """Runs functions in children, each in a process of its own."""

    def __init__(self, directory: Path, *, shim: Path | None = None) -> None:
        self._directory, self._environment = directory, environment(shim)

    def run(
        self,
        function: str,
        args: Sequence[Any] = (),
        *,
        timeout_secs: float = 60,
        fresh: bool = False,
        **request: Any,
    ) -> Outcome:
        """Runs `"module:function"` with `args` (JSON) in a child, a fork unless `fresh`. `path` is the text that a path must contain to
        count for `fault`; `limits` are resource limits by name (`{"RLIMIT_AS": 2**32}`).
        """
        scratch = Path(tempfile.mkdtemp(dir=self._directory))
        child = forked.start(
            RUN,
            request_of(function, args, scratch, **request),
            output=scratch / "output",
            environment=self._environment,
            fresh=fresh,
        )
        timed_out = False
        try:
            code = child.wait(timeout_secs)
        except TimeoutError:
            timed_out, code = True, child.end()
        outcome = Outcome(
            code,
            timed_out,
            child.max_rss_bytes,
            events=[json.loads(line) for line in _lines(scratch / "events")],
            ops=[_op(line) for line in _lines(scratch / "ops")],
            output="\n".join(_lines(scratch / "output")),
        )
        shutil.rmtree(scratch)
        return outcome

    def map(self, job: Callable[[T], R], values: Iterable[T]) -> Iterator[R]:
        """`job(value)` for each value, two of them at once."""
        with ThreadPoolExecutor(2) as threads:
            yield from threads.map(job, values)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _op(line: str) -> Op:
    number, name, written, path = line.split(" ", 3)
    return Op(int(number), name, path, int(written))
