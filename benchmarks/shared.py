"""What the scripts have in common: options, turns, new processes, medians with their spread, tables.

A script that measures new processes writes what they do as functions, and imports inside of them what they measure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [ROOT, *(ROOT / "integrations").iterdir()]  # the working tree, uninstalled
sys.path[:0] = map(str, PATHS)
MIB = 2**20

_CHILD = """
import importlib, json, sys
module, function, arguments = sys.argv[1:]
print(json.dumps(getattr(importlib.import_module(module), function)(*json.loads(arguments))))
"""


def options(doc: str | None, *, directory: bool = True, **defaults: Any) -> Any:
    """The arguments of a script: ``rounds=(3, "counted rounds")`` is ``--rounds``, an integer; most have ``--directory``."""
    import argparse

    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if directory:
        parser.add_argument("--directory", type=Path, help="where files are, on a real disk")
    for name, given in defaults.items():
        default, text = given if isinstance(given, tuple) else (given, None)
        option: dict[str, Any] = {"help": text, "default": default, "type": type(default)}
        if default is False:
            option = {"help": text, "action": "store_true"}
        elif isinstance(default, list):
            option |= {"type": type(default[0]), "nargs": "+"}
        parser.add_argument(f"--{name.replace('_', '-')}", **option)
    return parser.parse_args()


def fresh(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """What a function of a script gives in a new process, as JSON in its last line; ends the script if it failed."""
    module = Path(str(sys.modules[function.__module__].__file__))
    paths = os.pathsep.join(map(str, [module.parent, *PATHS, *filter(None, sys.path)]))
    inherited = os.environ | {"PYTHONPATH": paths, **environment}
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their byte code
    texts = [module.stem, function.__name__, json.dumps(arguments, default=str)]
    command = [sys.executable, "-W", "ignore", "-c", _CHILD, *texts]
    done = subprocess.run(command, env=inherited, stdout=subprocess.PIPE, text=True, timeout=3600)
    if done.returncode:
        sys.exit(f"a process ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def import_secs(module: str) -> float:
    """Seconds of an import beyond that of jax, for a new process; this module imports neither."""
    import importlib

    importlib.import_module("jax")
    return timed(lambda: importlib.import_module(module))[0]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the work gave."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def in_turn(
    ways: Iterable[Any], rounds: int, measure: Callable[[Any], Any], warm_ups: int = 0
) -> dict[Any, list[Any]]:
    """What was measured of each way in each round, all ways in turn; without the first rounds, that warm up."""
    found: dict[Any, list[Any]] = {way: [] for way in ways}
    for turn in range(warm_ups + rounds):
        for way, values in found.items():
            one = measure(way)
            if turn >= warm_ups:
                values.append(one)
    return found


def middle(values: Iterable[float]) -> float:
    import statistics

    return statistics.median(values)


def spread(values: Iterable[float], form: str = ".2f", factor: float = 1.0) -> str:
    """Median, minimum and maximum."""
    found = [factor * value for value in values]
    to = " - " if min(found) < 0 else "-"
    return f"{middle(found):{form}} ({min(found):{form}}{to}{max(found):{form}})"


def header(*names: str, words: int = 1) -> None:
    """Begins a table in Markdown; all but the first columns are numbers."""
    row(*names)
    print("|" + "---|" * words + "---:|" * (len(names) - words), flush=True)


def row(*cells: object) -> None:
    """A row of a table in Markdown."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def table(names: Sequence[str], rows: Mapping[str, Sequence[object]]) -> None:
    """A table with a name in front of each row."""
    header(*names)
    for name, cells in rows.items():
        row(name, *cells)
