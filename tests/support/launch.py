"""Starts real processes of ``jax.distributed`` on this machine: every wait has a limit.

The children run code that finds these names: ``index``, ``count``, ``directory``, ``jax``, ``np``,
``Mesh``, ``NamedSharding``, ``P``, ``ckpt``, ``options``, ``told``, and the functions of the prelude below.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.children import with_devices
from tests.support.ports import free_port

LIMIT_SECS = 90.0
PRELUDE = """
import json, os, signal, sys, time
index, count, port, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
import jax
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=index)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import ckpt_core as ckpt

assert jax.process_count() == count and jax.process_index() == index
options = ckpt.Options(timeout_secs=40)
told = {}  # what is reported at the end of the code, if it has not reported before
leaving = list(range(count))  # who has to be there at the end; a test that kills takes some out

def raised(call):
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "absent": list(getattr(error, "absent", ())),
            "secs": time.monotonic() - started,
        }
    return None

mesh = Mesh(np.array(jax.devices()), ("data",))

def put(values, spec=P("data"), mesh=mesh):
    # an array of which each process holds its parts
    values, where = np.asarray(values), NamedSharding(mesh, spec)
    dtype = jax.dtypes.canonicalize_dtype(values.dtype)  # of what has no part here, too
    return jax.make_array_from_callback(values.shape, where, lambda at: values[at], dtype=dtype)

def same(one, two):
    # bit for bit, of what this process holds
    pairs = zip(one.addressable_shards, two.addressable_shards, strict=True)
    return all(np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes() for a, b in pairs)

def shorten(secs):
    # what comes next waits no longer: what went before may have been slow on a busy machine
    object.__setattr__(options, "timeout_secs", secs)

def meet(name, who=None):
    # a barrier of the test's own, as files
    open(f"{directory}.{port}.{name}.{index}", "w").close()
    deadline = time.monotonic() + 60
    while not all(os.path.exists(f"{directory}.{port}.{name}.{n}") for n in who or range(count)):
        assert time.monotonic() < deadline, f"nobody came to {name}"
        time.sleep(0.02)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def report(**told):
    print("REPORT" + json.dumps(told), flush=True)
    meet("end", leaving)  # the first process holds the coordinator: nobody leaves before the others
    os._exit(0)
"""


@dataclass(frozen=True)
class Ended:
    """How a process ended: exit code or minus the signal, what it reported or None, all that it printed."""

    status: int
    told: dict[str, Any] | None
    text: str


def launch(
    code: str,
    directory: Path,
    *,
    processes: int = 2,
    devices: int = 2,
    limit_secs: float = LIMIT_SECS,
    imported: tuple[str, ...] = (),
) -> list[Ended]:
    """Runs code, after the prelude, in processes that know each other, each with ``devices``. They save in ``directory``, and what
    they print goes beside it; besides jax they find ``imported`` imported. Whatever is left at the limit, which is that of all
    together, is killed, and the test fails.
    """
    port = str(free_port())
    logs = directory.parent / f"logs.{port}"
    logs.mkdir(parents=True, exist_ok=True)
    files = [logs / f"{index}.log" for index in range(processes)]
    children: list[forked.Forked] = []
    late = False
    try:
        for index, file in enumerate(files):
            arguments = (str(index), str(processes), port, str(directory))
            environment = with_devices(devices)
            children.append(
                forked.start(
                    PRELUDE + code + "\nreport(**told)",
                    *arguments,
                    output=file,
                    environment=environment,
                    imported=imported,
                )
            )
        deadline = time.monotonic() + limit_secs
        for child in children:
            child.wait(max(0.1, deadline - time.monotonic()))
    except TimeoutError:
        late = True
    finally:
        statuses = [child.end() for child in children]
    texts = [file.read_text(errors="replace") for file in files]
    if late:
        pytest.fail(f"not done after {limit_secs:g} s:\n" + _tails(texts))
    return [Ended(status, _told(text), text) for status, text in zip(statuses, texts, strict=True)]


def reports(ended: Sequence[Ended]) -> list[dict[str, Any]]:
    """What each process reported; the test fails where one did not."""
    told = [process.told for process in ended]
    assert None not in told, _tails([process.text for process in ended])
    return [one for one in told if one is not None]


def _told(text: str) -> dict[str, Any] | None:
    lines = [line for line in text.splitlines() if line.startswith("REPORT")]
    return json.loads(lines[-1].removeprefix("REPORT")) if lines else None


def _tails(texts: Sequence[str]) -> str:
    return "\n".join(f"--- process {index}\n{text[-3000:]}" for index, text in enumerate(texts))
