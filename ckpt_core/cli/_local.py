"""``ckpt ls --local`` and ``ckpt rm --local``: what runs have in a fast directory of this host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

from rich.text import Text

from ckpt_core._directory import kind_at
from ckpt_core._errors import CheckpointError, CheckpointNotFound
from ckpt_core._run.tiers.ended import LocalRun, remove_run, runs_in
from ckpt_core._run.tiers.folders import local_root
from ckpt_core.cli._change import agreed
from ckpt_core.cli._text import console, counted, one_line, print_json, say, size, table, when

_STEPS = 5
"""Maximum number of steps named of a run."""


def _runs(directory: str) -> tuple[str, list[LocalRun]]:
    root = local_root(directory)
    if kind_at(root) != "directory":
        raise CheckpointNotFound(f"{root}: no such directory on this host")
    return root, runs_in(root)


def list_runs(directory: str, *, as_json: bool) -> int:
    """Prints the runs, the longest unused first; returns 0."""
    root, runs = _runs(directory)
    if as_json:
        print_json({"directory": root, "runs": [asdict(run) for run in runs]})
        return 0
    if not runs:
        say(f"{root}: no runs of ckpt")
        return 0
    names = ("run", "last used", "size", "processes", "steps", "state")
    console().print(table(root, names, list(map(_cells, runs))))
    return 0


def _cells(run: LocalRun) -> list[str | Text]:
    names = filter(None, (os.path.basename(run.path), run.persistent))
    name = Text("\n".join(map(one_line, names)))
    state = ("in use" if run.in_use else "ended") + ("" if run.mine else ", of another user")
    used = when(run.used_unix_secs)
    return [name, used, size(run.size_bytes), str(run.processes), _steps(run), state]


def _steps(run: LocalRun) -> str:
    more = f" and {len(run.steps) - _STEPS} more" if len(run.steps) > _STEPS else ""
    return ", ".join(map(str, run.steps[-_STEPS:])) + more


def remove_runs(
    directories: Sequence[str], *, names: Sequence[str], steps: Sequence[int], yes: bool
) -> int:
    """Removes what ended runs left, all of them or those of ``names``; returns 1 if something stays that was to go."""
    if len(directories) != 1 or steps:
        raise CheckpointError(
            "ckpt rm --local takes one local directory, and no --step: to delete a step everywhere, name the persistent "
            "directory, ckpt rm RUN --step N"
        )
    root, runs = _runs(directories[0])
    known = {os.path.basename(run.path): run for run in runs}
    for name in names:
        if name not in known:
            raise CheckpointNotFound(
                f"{root} has no run {name!r}; it has {', '.join(known) or 'no runs'}"
            )
        if known[name].in_use:
            raise CheckpointError(
                f"{known[name].path} is in use by a run that lives: nothing was removed"
            )
    chosen = [run for name, run in known.items() if not run.in_use and (name in names or not names)]
    for run in chosen:
        of = f" of {run.persistent}" if run.persistent else ""
        used = f"steps {_steps(run)}, last used {when(run.used_unix_secs)}"
        say(f"{run.path}{of}: {size(run.size_bytes)}, {used}")
    what = counted(len(chosen), "run", "runs")
    if not chosen or (not yes and not agreed(f"what {what} left here")):
        say("nothing was removed")
        return 1 if chosen else 0
    stays: list[str] = []
    for run in chosen:
        try:
            why = (
                "" if remove_run(run) else "somebody uses it now, or there is more than ckpt wrote"
            )
        except OSError as error:
            why = str(error)
        stays += [f"{run.path} stays: {why}"] if why else []
    say(f"{len(chosen) - len(stays)} of {what} removed")
    for text in stays:
        say(text)
    return 1 if stays else 0
