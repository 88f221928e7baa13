"""``ckpt bench run``: settings of the process, the run, and every output."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.bench import RunSettings, SuiteConfig, load_suite

if TYPE_CHECKING:
    from ckpt_core.bench._baseline import Comparison
    from ckpt_core.bench._results import CaseResult, Run, SuiteResult

FAILED, WRONG, SLOWER, INTERRUPTED = 1, 2, 3, 130

# Settings for a malloc that keeps freed memory. A virtual machine that returns memory to its host
# needs up to 10 us for every page that it touches again, which would be most of the measured time.
# libc reads them when a process starts, so the process restarts itself.
STEADY_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_ARENA_MAX": "1"}


def run(
    suite_file: Path,
    settings: RunSettings,
    *,
    hlo_dump: bool,
    baseline_capture: Path | None,
    baseline: Path | None,
    threshold: float,
    as_json: bool,
) -> int:
    """Runs the suite and writes all outputs; returns the exit code."""
    suite = load_suite(suite_file)
    _prepare_process(suite, settings.output if hlo_dump else None)
    from ckpt_core import _processes
    from ckpt_core.bench import _baseline, run_suite
    from ckpt_core.bench._jsonl import JsonLines
    from ckpt_core.bench._machine import describe_environment
    from ckpt_core.cli._progress import Progress

    capture = _given(baseline_capture, suite.baseline_capture_path)
    baseline = _given(baseline, suite.baseline_path)
    if baseline is not None:
        _baseline.read_baseline(baseline)  # before the run, which may take an hour
    # Generators of the user are imported from the working directory.
    if "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    _processes.join_from_environment(os.environ)
    settings.output.mkdir(parents=True, exist_ok=True)
    if _processes.this_run().index > 0:
        return _code(run_suite(suite, settings), None)
    lines = JsonLines(settings.output, suite.suite_name, describe_environment(settings.output))
    with Progress(quiet=as_json) as progress:

        def on_run(case: CaseResult, one: Run) -> None:
            lines.run(case, one)
            progress.run(case, one)

        result = run_suite(suite, settings, on_run)
    lines.finish(result)
    comparison = baseline and _baseline.compare(result, baseline, threshold)
    notices = _write_files(settings.output, result)
    if capture is not None:
        notices.insert(0, f"baseline: {_baseline.capture_baseline(result, capture)}")
    if as_json:
        print((settings.output / "results.jsonl").read_text(encoding="utf-8"), end="")
    else:
        _print(result, comparison, notices)
    return _code(result, comparison)


def _given(option: Path | None, of_suite: str | None) -> Path | None:
    return option or (Path(of_suite) if of_suite else None)


def _prepare_process(suite: SuiteConfig, hlo_output: Path | None) -> None:
    """Settings that must be made before jax is imported."""
    if hlo_output is not None:
        flags = f"--xla_dump_to={hlo_output.absolute() / 'hlo_dump'} --xla_dump_hlo_as_proto"
        if flags not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    if suite.steady_memory and not STEADY_MEMORY.items() <= os.environ.items():
        arguments = [sys.executable, "-m", "ckpt_core.cli", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, **STEADY_MEMORY})


def _print(result: SuiteResult, comparison: Comparison | None, notices: list[str]) -> None:
    from rich.console import Console

    from ckpt_core.bench._tables import print_comparison, print_result

    # Without a terminal, rich would assume 80 columns and truncate the table.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    print_result(result, console)
    if comparison is not None:
        print_comparison(comparison, console)
    for notice in notices:
        console.print(notice, markup=False)


def _write_files(output: Path, result: SuiteResult) -> list[str]:
    """Writes TensorBoard's files; returns lines that say where all results are."""
    from ckpt_core.bench._tensorboard import write_tensorboard

    notices = [f"results: {output / 'results.jsonl'}"]
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
