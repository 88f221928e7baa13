"""What the scripts have in common: options, turns, new processes, medians with their spread, tables, plots.

A script that measures new processes writes what they do as functions, and imports inside of them what they measure.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def start(
    function: Callable[..., Any], *arguments: Any, **environment: str
) -> subprocess.Popen[str]:
    """A new process in which a function of a script runs; its last line is what it gives, as JSON."""
    module = Path(str(sys.modules[function.__module__].__file__))
    paths = os.pathsep.join(map(str, [module.parent, *PATHS, *filter(None, sys.path)]))
    inherited = os.environ | {"PYTHONPATH": paths, **environment}
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their byte code
    texts = [module.stem, function.__name__, json.dumps(arguments, default=str)]
    command = [sys.executable, "-W", "ignore", "-c", _CHILD, *texts]
    return subprocess.Popen(command, env=inherited, stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> Any:
    """What the function of a process gave; ends the script if it failed."""
    out, _ = process.communicate(timeout=3600)
    if process.returncode:
        sys.exit(f"a process ended with {process.returncode}")
    return json.loads(out.splitlines()[-1])


def fresh(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """What a function of a script gives in a new process."""
    return result_of(start(function, *arguments, **environment))


def free_address() -> str:
    """An address on this machine at which nobody listens."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


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


def lines_of(found: Mapping[str, Sequence[tuple[float, float]]], axes: Any) -> None:
    """Draws a line with a style of its own for each name."""
    for (name, points), style in zip(found.items(), ("o-", "s-", "^-", "d--"), strict=True):
        axes.plot(*zip(*points, strict=True), style, label=name, markersize=5)
    axes.grid(alpha=0.3)


@contextlib.contextmanager
def plot(path: str, title: str, **layout: Any) -> Iterator[Any]:
    """Axes to draw on, which are written to a .png or .svg at the end; the same drawing has the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({"svg.hashsalt": "ckpt", "svg.fonttype": "none"})  # text is text
    figure, axes = plt.subplots(layout="constrained", **layout)
    yield axes
    figure.savefig(
        path, dpi=120, metadata={"Title": title} | ({"Date": None} if path.endswith(".svg") else {})
    )
