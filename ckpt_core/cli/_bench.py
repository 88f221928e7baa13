"""``ckpt bench run``: settings of the process, the run, and every output."""

from __future__ import annotations

import os
import shutil
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
    from ckpt_core.bench import _baseline, _tables, run_suite
    from ckpt_core.bench._machine import describe_environment
    from ckpt_core.bench._results import JsonLines, read_result
    from ckpt_core.cli._progress import Progress

    baseline = _given(baseline, suite.baseline_path)
    earlier = read_result(baseline) if baseline else None  # the run may take an hour
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
    comparison = earlier and _baseline.compare(result, earlier, threshold)
    notices = [f"results: {lines.path}", _tensorboard(settings.output, result)]
    capture = _given(baseline_capture, suite.baseline_capture_path)
    if capture is not None:
        capture.mkdir(parents=True, exist_ok=True)
        kept = capture / f"{result.environment['git_sha'] or 'unknown'}.jsonl"
        notices.append(f"baseline: {shutil.copyfile(lines.path, kept)}")
    if as_json:
        print(lines.path.read_text(encoding="utf-8"), end="")
    else:
        changes = [_tables.comparison_document(comparison)] if comparison else []
        print("\n".join([_tables.document(result), *changes, *notices]))
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


def _tensorboard(output: Path, result: SuiteResult) -> str:
    """Writes TensorBoard's files; returns a line that says where they are."""
    from ckpt_core.bench._tensorboard import write_tensorboard

    try:
        return f"tensorboard --logdir={write_tensorboard(output, result)}"
    except ModuleNotFoundError:
        return "TensorBoard: not installed (pip install 'ckpt-core[tensorboard]')"


def _code(result: SuiteResult, comparison: Comparison | None) -> int:
    if result.interrupted:
        return INTERRUPTED
    if result.failed or all(case.skipped for case in result.cases):
        return FAILED
    return SLOWER if comparison is not None and comparison.worse else 0
