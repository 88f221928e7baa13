"""``ckpt bench run``: settings of the process, the run, and every output."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.bench import SuiteConfig, load_suite

if TYPE_CHECKING:
    from ckpt_core.bench._baseline import Comparison
    from ckpt_core.bench._results import SuiteResult

FAILED, WRONG, SLOWER, INTERRUPTED = 1, 2, 3, 130

# Settings for a malloc that keeps freed memory. A virtual machine that returns memory to its host
# needs up to 10 us for every page that it touches again, which would be most of the measured time.
# libc reads them when a process starts, so the process restarts itself.
STEADY_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Request:
    """The arguments of the command."""

    suite: Path
    output: Path
    local_directory: Path | None
    remove_repeated_dir: bool
    enable_hlo_dump: bool
    baseline_capture: Path | None
    baseline: Path | None
    threshold: float
    repeats: int | None
    only: str | None
    as_json: bool


def run(request: Request) -> int:
    """Runs the suite and writes all outputs; returns the exit code."""
    suite = load_suite(request.suite)
    _prepare_process(suite, request)
    baseline = request.baseline or (Path(suite.baseline_path) if suite.baseline_path else None)
    if baseline is not None:
        from ckpt_core.bench._baseline import read_baseline

        read_baseline(baseline)  # report a wrong path before the run, which may take an hour
    # Generators of the user are imported from the working directory.
    if "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    from ckpt_core import _processes
    from ckpt_core.bench import RunSettings, run_suite
    from ckpt_core.bench._environment import describe_environment
    from ckpt_core.bench._jsonl import JsonLines
    from ckpt_core.cli._progress import Progress

    _processes.join_from_environment(os.environ)
    first = _processes.this_run().index == 0
    request.output.mkdir(parents=True, exist_ok=True)
    settings = RunSettings(
        output=request.output,
        local_directory=request.local_directory,
        remove_repeated_dir=request.remove_repeated_dir,
        repeats=request.repeats,
        only=request.only,
    )
    if not first:
        result = run_suite(suite, settings)
        return _code(result, None)
    lines = JsonLines(request.output, suite.suite_name, describe_environment(request.output))
    with Progress(quiet=request.as_json) as progress:

        def heard(case: object, one: object) -> None:
            lines.run(case, one)  # pyright: ignore
            progress.heard(case, one)  # pyright: ignore

        result = run_suite(suite, settings, heard)
    lines.finish(result)
    return _report(suite, request, result, baseline)


def _prepare_process(suite: SuiteConfig, request: Request) -> None:
    """Settings that must be made before jax is imported."""
    if request.enable_hlo_dump:
        flags = f"--xla_dump_to={request.output.absolute() / 'hlo_dump'} --xla_dump_hlo_as_proto"
        if flags not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    if suite.steady_memory and not _steady(os.environ):
        arguments = [sys.executable, "-m", "ckpt_core.cli", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, **STEADY_MEMORY})


def _steady(environment: Mapping[str, str]) -> bool:
    return STEADY_MEMORY.items() <= environment.items()


def _report(
    suite: SuiteConfig, request: Request, result: SuiteResult, baseline: Path | None
) -> int:
    from rich.console import Console

    from ckpt_core.bench import _baseline
    from ckpt_core.bench._table import print_result

    comparison: Comparison | None = None
    if baseline is not None:
        comparison = _baseline.compare(result, baseline, request.threshold)
    notices: list[str] = []
    capture = request.baseline_capture or (
        Path(suite.baseline_capture_path) if suite.baseline_capture_path else None
    )
    if capture is not None:
        notices.append(f"baseline: {_baseline.capture_baseline(result, capture)}")
    notices += _write_files(request.output, result, comparison)
    if request.as_json:
        print((request.output / "results.jsonl").read_text(encoding="utf-8"), end="")
    else:
        # Without a terminal, rich would assume 80 columns and truncate the table.
        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        print_result(result, console)
        if comparison is not None:
            from ckpt_core.bench._table import print_comparison

            print_comparison(comparison, console)
        for notice in notices:
            console.print(notice, markup=False)
    return _code(result, comparison)


def _write_files(output: Path, result: SuiteResult, comparison: Comparison | None) -> list[str]:
    """Writes the page and TensorBoard's files; returns lines that say where they are."""
    from ckpt_core.bench._page import write_page
    from ckpt_core.bench._tensorboard import write_tensorboard

    notices = [
        f"results: {output / 'results.jsonl'}",
        f"page: {write_page(output, result, comparison)}",
    ]
    try:
        notices.append(f"tensorboard --logdir={write_tensorboard(output, result)}")
    except ModuleNotFoundError:
        notices.append("TensorBoard: not installed (pip install 'ckpt-core[tensorboard]')")
    return notices


def _code(result: SuiteResult, comparison: Comparison | None) -> int:
    if result.interrupted:
        return INTERRUPTED
    nothing_ran = not any(case.runs for case in result.cases)
    if result.failed or nothing_ran:
        return FAILED
    return SLOWER if comparison is not None and comparison.worse else 0
