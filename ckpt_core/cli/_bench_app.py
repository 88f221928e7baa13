"""``ckpt bench``: its commands and their arguments; ``_bench`` implements them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpt_core.cli._arguments import Json

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
) -> None:
    """Run a suite: print a table; write JSON lines and TensorBoard files to OUTPUT."""
    from ckpt_core.bench import RunSettings
    from ckpt_core.cli import _bench

    if processes > 1:
        from ckpt_core.cli import _spawn

        raise typer.Exit(_spawn.run_processes(processes))
    settings = RunSettings(output, local_directory, remove_repeated_dir, repeats, only)
    code = _bench.run(
        suite,
        settings,
        hlo_dump=enable_hlo_dump,
        baseline_capture=baseline_capture,
        baseline=baseline,
        threshold=threshold,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command("markdown")
def bench_markdown(
    results: Annotated[Path, typer.Argument(help="results.jsonl of a run, or its directory.")],
) -> None:
    """Print the tables of a run again, with ratios to the first case."""
    from ckpt_core.bench._results import FILE, read_result
    from ckpt_core.bench._tables import document

    typer.echo(document(read_result(results / FILE if results.is_dir() else results)), nl=False)
