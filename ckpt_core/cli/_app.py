"""The commands and their arguments; the other modules of this package implement them."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpt_core._errors import CheckpointError
from ckpt_core.cli._arguments import (
    Json,
    Local,
    Mib,
    Newest,
    Only,
    Place,
    Prefix,
    Rules,
    Run,
    bytes_option,
)
from ckpt_core.cli._bench import app as bench_app

app = typer.Typer(
    name="ckpt",
    help="Look at checkpoints, check them, and measure saving and loading.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="The version, and no more.")] = False,
) -> None:
    if version:
        import ckpt_core

        typer.echo(f"ckpt {ckpt_core.__version__}")
        raise typer.Exit


@app.command("ls")
def list_steps(
    directory: Run,
    as_json: Json = False,
    local: Local = False,
    prefix: Prefix = None,
) -> int:
    """List the steps in a directory: time, sizes, items, metrics; unfinished saves and the writer."""
    if local:
        from ckpt_core.cli import _local

        return _local.list_runs(directory, as_json=as_json)
    from ckpt_core.cli import _steps

    return _steps.list_steps(directory, as_json=as_json, step_prefix=prefix)


@app.command()
def show(
    path: Place,
    leaf: Annotated[
        bool,
        typer.Option("--leaf", "--leaves", help="Every leaf, not only the first of each item."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Show what a checkpoint holds, and the purpose of each of its files; reads no array."""
    from ckpt_core.cli import _look

    return _look.show(path, all_leaves=leaf, as_json=as_json)


@app.command()
def verify(
    path: Place,
    as_json: Json = False,
) -> int:
    """Check every byte against its checksum. The exit code is 1 if anything is wrong."""
    from ckpt_core.cli import _look

    return _look.verify(path, as_json=as_json)


@app.command("report")
def make_report(
    path: Place,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page; report.html if not given.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--verify", help="Check every byte of every step, too.")
    ] = False,
    stats: Annotated[
        int, typer.Option(min=0, help="Read the arrays of so many of the newest steps, too.")
    ] = 0,
    as_json: Json = False,
    prefix: Prefix = None,
) -> int:
    """Write a page about a run: bytes, leaves, shardings, steps, differences, health; reads arrays with --stats only."""
    from ckpt_core.cli import _report
    from ckpt_core.report import Request

    where = output if output is not None or as_json else Path("report.html")
    request = Request(verify=check, stats=stats, step_prefix=prefix)
    return _report.report(path, where, request, as_data=as_json)


@app.command("cp")
def copy(
    source: Place,
    target: Annotated[
        str, typer.Argument(help="Path or URL (s3://, gs://); nothing may be there.")
    ],
    step: Annotated[list[int] | None, typer.Option(help="Only this step; may be repeated.")] = None,
    prefix: Prefix = None,
    mirror: Annotated[
        bool,
        typer.Option(
            "--mirror", help="Retire what the target has of another history; in a bucket delete it."
        ),
    ] = False,
) -> int:
    """Copy a checkpoint or steps between disk and buckets; verify all bytes; skip what is there."""
    from ckpt_core.cli import _change

    return _change.copy(source, target, steps=step or [], prefix=prefix, mirror=mirror)


@app.command("export")
def export(
    path: Annotated[str, typer.Argument(help="A checkpoint: path or URL.")],
    target: Annotated[str, typer.Argument(help="A file; of safetensors, or a folder.")],
    to: Annotated[
        str | None, typer.Option(help="safetensors, torch or npz; else by the name.")
    ] = None,
    item: Annotated[str | None, typer.Option(help="Which item, of several.")] = None,
    only: Only = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Patterns of leaves to leave out.")
    ] = None,
    rules: Rules = None,
    max_shard_mib: Annotated[
        int, typer.Option(min=1, help="The most tensors in a safetensors file.")
    ] = 5120,
    as_json: Json = False,
) -> int:
    """Write the arrays of a checkpoint in another format; streamed, and verified as they are read."""
    from ckpt_core.cli import _convert

    return _convert.export(
        path,
        target,
        to=to,
        item=item,
        only=only or [],
        exclude=exclude or [],
        rules=rules,
        max_shard_bytes=max_shard_mib * 2**20,
        as_json=as_json,
    )


@app.command("import")
def import_weights(
    source: Annotated[str, typer.Argument(help="A file or folder of another program.")],
    target: Annotated[str, typer.Argument(help="The new checkpoint: path or URL.")],
    format: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="safetensors, npz, torch, dcp, flax, keras or orbax; else by what is in it.",
        ),
    ] = None,
    item: Annotated[
        str | None, typer.Option(help="Name of the item; of Orbax, the one to take.")
    ] = None,
    only: Only = None,
    rules: Rules = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="OLD=NEW, leading parts; may be repeated.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Cuts names into levels, such as at '.'.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    as_json: Json = False,
) -> int:
    """Make a checkpoint of files of another format; streamed, and there at once or not at all."""
    from ckpt_core.cli import _convert

    return _convert.import_weights(
        source,
        target,
        format=format,
        item=item,
        only=only or [],
        rules=rules,
        rename=rename or [],
        split=split,
        overwrite=overwrite,
        as_json=as_json,
    )


@app.command()
def diff(
    a: Newest,
    b: Newest,
    only: Only = None,
    limit: Annotated[int, typer.Option(min=0, help="Lines of each kind.")] = 30,
    as_json: Json = False,
) -> int:
    """Compare two checkpoints leaf by leaf: how far values moved. The exit code is 1 if anything differs."""
    from ckpt_core.cli import _numbers

    return _numbers.diff(a, b, only=only or [], limit=limit, as_json=as_json)


@app.command()
def stats(
    path: Newest,
    only: Only = None,
    as_json: Json = False,
) -> int:
    """Print range, mean, norm, NaN and Inf of every leaf. The exit code is 1 if there are any of the last two."""
    from ckpt_core.cli import _numbers

    return _numbers.stats(path, only=only or [], as_json=as_json)


@app.command("rm")
def remove(
    paths: Annotated[list[str], typer.Argument(help="Checkpoints, or one directory of steps.")],
    steps: Annotated[
        list[int] | None, typer.Option("--step", help="A step of the directory; may be repeated.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    prefix: Prefix = None,
    local: Local = False,
    run: Annotated[
        list[str] | None,
        typer.Option(help="With --local: only this run's folder; may be repeated."),
    ] = None,
) -> int:
    """Delete checkpoints, hidden first, so that no reader meets half of one; a step that is being read stays."""
    if local:
        from ckpt_core.cli import _local

        return _local.remove_runs(paths, names=run or [], steps=steps or [], yes=yes)
    from ckpt_core.cli import _change

    return _change.remove(paths, steps=steps or [], prefix=prefix, yes=yes)


@app.command("gc")
def collect_garbage(
    directory: Run,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Delete what dead writers left in a directory; never what a living one may be writing."""
    from ckpt_core.cli import _change

    return _change.collect_garbage(directory, dry_run=dry_run, as_json=as_json)


@app.command()
def doctor(
    directory: Annotated[
        str, typer.Argument(help="Where checkpoints are, or will be: a directory or URL.")
    ] = ".",
    devices: Annotated[
        bool,
        typer.Option("--devices", help="Ask jax for its devices, too; takes them for a moment."),
    ] = False,
    mib: Mib = 64,
    state_bytes: Annotated[
        int, bytes_option("Of a step, such as 16GB: says how many fit.", "1GiB")
    ] = 2**30,
    as_json: Json = False,
) -> int:
    """Look for what most often goes wrong: a real save, versions, file system, speed, locks, clock. The exit code is 1 if found."""
    from ckpt_core.cli import _doctor

    return _doctor.doctor(
        directory, devices=devices, mib=mib, step_bytes=state_bytes, as_json=as_json
    )


@app.command()
def plan(
    state_bytes: Annotated[int, bytes_option("Of each host: a number, or as 16GB, 1.5GiB.")],
    step_secs: Annotated[float, typer.Option(min=1e-6, max=1e6, help="Of one training step.")],
    mtbf_hours: Annotated[
        float,
        typer.Option(
            "--mtbf", min=1e-3, max=1e6, help="Mean hours between failures of the whole job."
        ),
    ],
    directory: Annotated[
        str, typer.Argument(help="Where checkpoints will be: a directory or URL.")
    ] = ".",
    local: Annotated[
        str | None, typer.Option(help="The fast directory before it, if there is one.")
    ] = None,
    lost_hosts: Annotated[
        float,
        typer.Option(
            min=0.001, max=0.999, help="Share of failures that take the fast directory with them."
        ),
    ] = 0.5,
    start_secs: Annotated[
        float, typer.Option(min=0, max=1e6, help="From a failure to the restore.")
    ] = 120.0,
    slowdown: Annotated[
        float, typer.Option(min=0, max=1, help="Share by which steps are slower during a save.")
    ] = 0.03,
    host_rate: Annotated[
        int | None, bytes_option("Bytes per second from the devices; else a copy is timed.")
    ] = None,
    mib: Mib = 64,
    as_json: Json = False,
) -> int:
    """How often to save: measures this machine, and prints the interval that loses least time."""
    from ckpt_core.cli import _plan

    question = _plan.Question(
        directory=directory,
        local=local,
        state_bytes=state_bytes,
        step_secs=step_secs,
        failure_secs=mtbf_hours * 3600,
        lost_hosts=lost_hosts,
        start_secs=start_secs,
        slowdown=slowdown,
        host_bytes_per_sec=host_rate,
        probe_bytes=mib * 2**20,
    )
    return _plan.plan(question, as_json=as_json)


def _name_all_missing(error: Any) -> None:
    """Has an error about an option that is missing name the others, too, which else would take a try each."""
    if type(error).__name__ != "MissingParameter" or error.ctx is None or error.param is None:
        return
    kind, taken = error.param.param_type_name, error.ctx.params  # what was typed is taken first
    missing = [
        repr(max(one.opts, key=len))
        for one in error.ctx.command.params
        if one.required and one.name not in taken and one.param_type_name == kind
    ]
    if len(missing) > 1:
        error.param_hint = ", ".join(missing)


def run() -> int:
    """Runs the command and returns its exit code; prints an error as one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escape characters that the encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except (CheckpointError, OSError) as error:
        from ckpt_core.cli._text import message_of

        print(f"ckpt: {message_of(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        show_usage = getattr(error, "show", None)  # click's errors about arguments have it
        if show_usage is None:
            raise
        _name_all_missing(error)
        show_usage()
        return int(getattr(error, "exit_code", 2))
    return code if isinstance(code, int) else 0
