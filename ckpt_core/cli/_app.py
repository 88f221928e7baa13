"""The commands and their arguments; the modules that implement them are imported when they run."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_core._errors import CheckpointError, StructureMismatch
from ckpt_core._lazy import LazyModule
from ckpt_core.cli._bench import app as bench_app
from ckpt_core.cli._convert import export, import_weights, report
from ckpt_core.cli._numbers import diff, stats
from ckpt_core.cli._plan import plan
from ckpt_core.cli._shared import Json, Local, Mib, Place, Prefix, Root, Run, bytes_option, one_line

if TYPE_CHECKING:
    from ckpt_core.cli import _change, _doctor, _look, _steps
else:
    names = ("_change", "_doctor", "_look", "_steps")
    _change, _doctor, _look, _steps = (LazyModule(f"ckpt_core.cli.{name}") for name in names)

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
    directory: Run, as_json: Json = False, local: Local = False, prefix: Prefix = None
) -> int:
    """List the steps in a directory: time, sizes, items, metrics; unfinished saves and the writer."""
    if local:
        return _change.list_runs(directory, as_json=as_json)
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
    return _look.show(path, all_leaves=leaf, as_json=as_json)


@app.command()
def verify(path: Place, as_json: Json = False) -> int:
    """Check every byte against its checksum. The exit code is 1 if anything is wrong."""
    return _look.verify(path, as_json=as_json)


app.command()(report)


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
    return _change.copy(source, target, steps=step or [], prefix=prefix, mirror=mirror)


app.command("export")(export)
app.command("import")(import_weights)
app.command()(diff)
app.command()(stats)


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
        return _change.remove_runs(paths, names=run or [], steps=steps or [], yes=yes)
    return _change.remove(paths, steps=steps or [], prefix=prefix, yes=yes)


@app.command("save-now")
def save_now(
    directory: Run,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECS", help="Wait so long for the step to be saved.")
    ] = 0,
    as_json: Json = False,
) -> int:
    """Ask a running job to save its next step, without stopping it. The exit code is 1 if the wait ends before."""
    return _change.save_now(directory, wait_secs=wait, as_json=as_json)


@app.command("gc")
def collect_garbage(
    directory: Run,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Delete what dead writers left in a directory; never what a living one may be writing."""
    return _change.collect_garbage(directory, dry_run=dry_run, as_json=as_json)


@app.command()
def doctor(
    directory: Root = ".",
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
    return _doctor.doctor(
        directory, devices=devices, mib=mib, step_bytes=state_bytes, as_json=as_json
    )


app.command()(plan)


def _message_of(error: Exception) -> str:
    """The message of an error, for a terminal: of several lines only where each has a mismatch."""
    text = str(error)
    if not isinstance(error, StructureMismatch):
        return one_line(text)
    for mismatch in error.mismatches:
        text = text.replace(str(mismatch), one_line(str(mismatch)))
    return "\n".join(map(one_line, text.split("\n")))


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
        print(f"ckpt: {_message_of(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        show_usage = getattr(error, "show", None)  # click's errors about arguments have it
        if show_usage is None:
            raise
        show_usage()
        return int(getattr(error, "exit_code", 2))
    return code if isinstance(code, int) else 0
