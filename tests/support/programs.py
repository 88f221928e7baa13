"""The programs of ``examples/ports``: as they are, with one import changed, and natively.

Beside each are the diffs that move it. Here they are run in processes of their own, killed at random, and resumed.
"""

import random
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import forked
from tests.support.children import compiling_once, with_devices
from tests.support.paths import EXAMPLES
from tests.support.ports import free_port

LIMIT_SECS = 300.0
PORTS = EXAMPLES / "ports"
_PRELUDE = """
import builtins, os, signal, sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "orbax":
            raise ModuleNotFoundError(f"no {name} here")

def armed(directories, dies_at, after):
    # SIGKILL at the n-th call into one of the directories after a step was trained
    paths, left, printed = tuple(map(os.path.realpath, directories)), after, print

    def count(event, arguments):
        nonlocal left
        if dies_at >= 0 and reached and arguments and isinstance(arguments[0], str):
            if os.path.realpath(arguments[0]).startswith(paths):
                left -= 1
                if left <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    def noticed(*what, **how):
        printed(*what, **how, flush=True)
        if what and what[0] == "step" and what[1] >= dies_at:
            reached.append(what[1])

    reached, builtins.print = [], noticed
    sys.addaudithook(count)

_alone, _index, _count, _port, _dies_at, _after = [int(sys.argv.pop(1)) for _ in range(6)]
if _alone:
    sys.meta_path.insert(0, Without())
if _count > 1:
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{_port}", num_processes=_count, process_id=_index)
armed(sys.argv[1:], _dies_at, _after)
"""

_END = """
def _digest(tree):
    import hashlib, jax
    import numpy as np

    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if callable(leaf): continue  # its bytes would be an address
        leaf = leaf.jax() if hasattr(leaf, "jax") else leaf  # a tensor of torchax
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        # another process has the rest of a sharded array
        parts = leaf.addressable_shards if isinstance(leaf, jax.Array) else []
        for part in [shard.data for shard in parts] or [leaf]:
            found.update(f"{jax.tree_util.keystr(path)} {np.asarray(part).dtype} {np.shape(part)}".encode())
            found.update(np.asarray(part).tobytes())
    return found.hexdigest()

print("DIGEST", _digest((RESULT)))
"""


def forms_of(port: str) -> dict[str, str]:
    """The program as it is, "theirs", and each form that a diff beside it makes."""
    forms = {"theirs": (PORTS / f"{port}.py").read_text()}
    for form, name in {"face": "one_import", "native": "native"}.items():
        if (file := PORTS / f"{port}.{name}.diff").exists():
            forms[form] = patched(forms["theirs"], file.read_text())
    return forms


def patched(text: str, diff: str) -> str:
    """The text after the hunks of a diff; AssertionError if what a hunk takes away is not there, or more than once."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] or "\n" for line in lines if line[0] in " -\n")
        new = "".join(line[1:] or "\n" for line in lines if line[0] in " +\n")
        assert text.count(old) == 1, f"{text.count(old)} times in the program:\n{old}"
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class Kill:
    """When a process is killed: at the n-th call into its directory after it has trained a step."""

    step: int
    after: int


@dataclass(frozen=True)
class Ended:
    """How a program ended: the steps that it trained, and a digest of its result, None if it was killed."""

    steps: Sequence[int]
    digest: str | None


class Program:
    """The program ``port`` of ``examples/ports``, in its three forms; ``result`` is an expression of the state that it ends with.
    Caches, logs and runs lie in ``place``. The native form gets ``more`` arguments after the directory; ``with_orbax``: the form
    with one import changed needs Orbax, too.
    """

    def __init__(
        self,
        port: str,
        result: str,
        place: Path,
        *,
        devices: int = 1,
        processes: int = 1,
        more: Sequence[str] = (),
        with_orbax: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._forms = forms_of(port)
        self._with_orbax = {"theirs", *(["face"] if with_orbax else [])}
        self._end = _END.replace("RESULT", result)
        self._place, self._count, self._more = place, processes, tuple(more)
        self._environment = (
            with_devices(devices) | compiling_once(place / "cache") | dict(environment or {})
        )
        self._runs = 0

    def run(self, form: str, directory: Path, kill: Kill | None = None) -> list[Ended]:
        """Runs a form ("theirs", "face" or "native") to its end, or until the last process is killed, and then the others; what each
        process has done.
        """
        self._runs += 1
        port, code = str(free_port()), _PRELUDE + self._forms[form] + self._end
        files = [self._place / f"{self._runs}.{form}.{n}.log" for n in range(self._count)]
        children: list[forked.Forked | forked.Spawned] = []
        try:
            for index, file in enumerate(files):
                dies = kill if index == self._count - 1 else None
                numbers = (-1, 0) if dies is None else (dies.step, dies.after)
                alone = int(form not in self._with_orbax)
                arguments = [alone, index, self._count, port, *numbers, directory]
                arguments += self._more if form == "native" else []
                children.append(
                    forked.start(
                        code, *map(str, arguments), output=file, environment=self._environment
                    )
                )
            for child in reversed(children):
                status = child.wait(LIMIT_SECS)
                said = files[children.index(child)].read_text(errors="replace")
                assert status == (-signal.SIGKILL if kill else 0), (
                    f"{form}, {kill}: {status}\n{said}"
                )
                if kill is not None:
                    break
        finally:
            for child in children:
                child.end()
        return [_ended(file.read_text(errors="replace")) for file in files]


def _ended(text: str) -> Ended:
    steps = [int(number) for number in re.findall(r"^step (\d+)", text, re.M)]
    digest = re.search(r"^DIGEST (\w+)$", text, re.M)
    return Ended(steps, None if digest is None else digest[1])


def two_kills(steps: int, most_calls: int = 30) -> tuple[Kill, Kill]:
    """Two moments drawn at random, the second in a run that has been resumed after the first."""
    first = random.randint(steps // 3, steps // 2)
    second = random.randint(first + 1, steps - 3)
    return Kill(first, random.randint(1, most_calls)), Kill(second, random.randint(1, most_calls))
