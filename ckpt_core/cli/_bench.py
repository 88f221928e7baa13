"""``ckpt bench``: its commands import what they need when they run, for ``_prepare_process`` comes before jax."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_core.cli._shared import Json

if TYPE_CHECKING:
    from ckpt_core.bench import SuiteConfig
    from ckpt_core.bench._results import CaseResult, Run, SuiteResult

FAILED, SLOWER, INTERRUPTED = 1, 3, 130

# A malloc that keeps freed memory: some virtual machines need 10 us for each page that is touched again.
# libc reads these settings when a process starts, so the process restarts itself.
_STEADY_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_ARENA_MAX": "1"}
_GRACE_SECS = 30.0

app = typer.Typer(help="Benchmarks of ckpt and its peers.", no_args_is_help=True)


@app.command("run")
def bench_run(
    suite: Annotated[Path, typer.Argument(help="A suite file (YAML).", dir_okay=False)],
    output: Annotated[
        Path, typer.Option("-o", "--output", "--output-directory", help="Where results go.")
    ],
    local_directory: Annotated[
        Path | None, typer.Option(help="Local scratch space for benchmarks that use it.")
    ] = None,
    remove_repeated_dir: Annotated[
        bool, typer.Option("--remove-repeated-dir", help="Delete what each run wrote.")
    ] = False,
    enable_hlo_dump: Annotated[
        bool, typer.Option("--enable-hlo-dump", help="XLA's HLO into OUTPUT/hlo_dump.")
    ] = False,
    baseline_capture: Annotated[
        Path | None,
        typer.Option(
            "--baseline-capture", "--baseline-capture-path", help="Write <git sha>.jsonl here."
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline", "--baseline-path", help="Compare with this results.jsonl; 3 if worse."
        ),
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0, help="How much worse is worse: 0.1 is ten percent.")
    ] = 0.1,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Instead of the suite's num_repeats.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Cases whose label or group matches, such as '*orbax*'.")
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="So many local processes of jax.distributed, on CPUs.")
    ] = 1,
    as_json: Json = False,
) -> int:
    """Run a suite: print a table; write JSON lines and TensorBoard files to OUTPUT."""
    if processes > 1:
        return _run_processes(processes)
    from ckpt_core import _processes
    from ckpt_core.bench import RunSettings, _tables, load_suite, run_suite
    from ckpt_core.bench._machine import describe_environment
    from ckpt_core.bench._results import JsonLines, read_result

    config = load_suite(suite)
    _prepare_process(config, output if enable_hlo_dump else None)
    settings = RunSettings(output, local_directory, remove_repeated_dir, repeats, only)
    capture = baseline_capture or config.baseline_capture_path
    baseline = baseline or (Path(config.baseline_path) if config.baseline_path else None)
    earlier = read_result(baseline) if baseline else None  # the run may take an hour
    # Generators of the user are imported from the working directory.
    if "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    _processes.join_from_environment(os.environ)
    output.mkdir(parents=True, exist_ok=True)
    if _processes.this_run().index > 0:
        return _code(run_suite(config, settings), 0)
    lines = JsonLines(output, config.suite_name, describe_environment(output))

    def on_run(case: CaseResult, one: Run) -> None:
        lines.run(case, one)
        if not as_json:
            outcome = "skipped" if one.skipped else f"failed: {one.error}" if one.error else "done"
            typer.echo(f"{case.title}, {one.kind} {one.repeat}: {outcome}", err=True)

    result = run_suite(config, settings, on_run)
    lines.finish(result)
    changes, worse = _tables.compare(result, earlier, threshold) if earlier else ("", 0)
    notices = [f"results: {lines.path}"]
    try:
        notices.append(f"tensorboard --logdir={_tables.write_tensorboard(output, result)}")
    except ModuleNotFoundError:
        notices.append("TensorBoard: not installed (pip install 'ckpt-core[tensorboard]')")
    if capture is not None:
        kept = Path(capture, f"{result.environment['git_sha'] or 'unknown'}.jsonl")
        kept.parent.mkdir(parents=True, exist_ok=True)
        notices.append(f"baseline: {shutil.copyfile(lines.path, kept)}")
    if as_json:
        typer.echo(lines.path.read_text(encoding="utf-8"), nl=False)
    else:
        documents = filter(None, (_tables.document(result), changes))
        typer.echo("\n".join([*documents, *notices]))
    return _code(result, worse)


@app.command("markdown")
def bench_markdown(
    results: Annotated[Path, typer.Argument(help="results.jsonl of a run, or its directory.")],
) -> None:
    """Print the tables of a run again, with ratios to the first case."""
    from ckpt_core.bench._results import FILE, read_result
    from ckpt_core.bench._tables import document

    typer.echo(document(read_result(results / FILE if results.is_dir() else results)), nl=False)


def _run_processes(count: int) -> int:
    """Runs this command in local processes of one jax.distributed run; returns the first exit code that is not 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [*sys.argv[1:], "--processes", "1"]  # of an option given twice, the last counts
    variables = {
        "JAX_PLATFORMS": "cpu",
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "ckpt_core.cli", *arguments],
            env=variables | {"JAX_PROCESS_ID": str(index)},
            stdout=subprocess.DEVNULL if index else None,
        )
        for index in range(count)
    ]
    try:
        codes = [child.wait() for child in children]
        return next((max(code, FAILED) for code in codes if code), 0)
    except KeyboardInterrupt:
        # the children got Ctrl-C and write their results; one that waits within a save does not end
        with contextlib.suppress(subprocess.TimeoutExpired):
            for child in children:
                child.wait(_GRACE_SECS)
        return INTERRUPTED
    finally:
        for child in children:
            child.kill()  # does nothing to one that has ended
            child.wait()


def _prepare_process(suite: SuiteConfig, hlo_output: Path | None) -> None:
    """Settings that must be made before jax is imported."""
    if hlo_output is not None:
        flags = f"--xla_dump_to={hlo_output.absolute() / 'hlo_dump'} --xla_dump_hlo_as_proto"
        if flags not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    if suite.steady_memory and not _STEADY_MEMORY.items() <= os.environ.items():
        arguments = [sys.executable, "-m", "ckpt_core.cli", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, **_STEADY_MEMORY})


def _code(result: SuiteResult, worse: int) -> int:
    failed = result.failed or all(case.skipped for case in result.cases)
    return INTERRUPTED if result.interrupted else FAILED if failed else SLOWER if worse else 0
