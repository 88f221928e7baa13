"""Kills `train_nnx.py` in the middle of its saves and shows that no bit of the result changes.

One run is not interrupted. Another is killed with SIGKILL while it writes a checkpoint, several
times, each time when a random part of the bytes is on the disk, and started again. Both runs must
agree in every loss they computed and in every leaf of their final state.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from _picture import Losses, draw

HERE = Path(__file__).resolve().parent
WANTED_HITS = 5
MOST_KILLS = 12
FIRST_KILL_STEP = 0  # the first save, so that the resumed run finds no checkpoint
STEPS_BETWEEN_KILLS = 16


@dataclass
class Life:
    """One process of the interrupted run, from its start to its death."""

    first_step: int = 0
    saving_step: int | None = None  # None: it was not killed
    unfinished_bytes: int = 0  # of the save that was killed; 0: the kill came too late
    losses: Losses = field(default_factory=list)


def demonstrate(directory: Path, total_steps: int) -> int:
    """Runs the whole demonstration below `directory`; returns the exit status."""
    started = time.monotonic()
    directory = directory.expanduser().resolve()
    straight, killed = directory / "straight", directory / "killed"
    for run in (straight, killed):
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)

    seed, picture = random.randrange(1000), directory / "loss.svg"
    print(f"about two minutes on two cores; at the end look at {picture}")
    print(
        f"run 1: {total_steps} steps without interruption; the step is compiled first", flush=True
    )
    step_bytes = run_through(straight, total_steps)
    took_secs = time.monotonic() - started
    print(f"  {took_secs:.0f} s; a checkpoint has {step_bytes / 1e6:.1f} MB")

    print(f"run 2: the same, killed with SIGKILL while it writes (seed {seed})", flush=True)
    lives = run_with_kills(killed, total_steps, step_bytes, random.Random(seed))

    failures = compare(straight, killed, lives)
    runs = [(life.losses, life.saving_step is not None) for life in lives]
    draw(picture, read_losses(straight), runs)
    print(f"total: {time.monotonic() - started:.0f} s")
    for failure in failures:
        print(f"FAILED: {failure}")
    print("FAILED" if failures else "OK: every bit of the killed run equals the uninterrupted run")
    return 1 if failures else 0


def run_through(run: Path, total_steps: int) -> int:
    """Runs to the end; returns the bytes of a checkpoint."""
    began, shows = time.monotonic(), sys.stdout.isatty()
    with start(run, total_steps) as process:
        for line in process.stdout or ():
            if (step := saved_step(line)) is not None:
                told = f"  step {step} of {total_steps} after {time.monotonic() - began:.0f} s"
                print(f"\r{told}" if shows else told, end="" if shows else "\n", flush=True)
    print("\r" if shows else "", end="")
    if process.returncode != 0:
        raise SystemExit(f"the uninterrupted run ended with status {process.returncode}")
    return max(map(size_bytes, (run / "checkpoints").glob("[0-9]*")))


def run_with_kills(
    run: Path, total_steps: int, step_bytes: int, chance: random.Random
) -> list[Life]:
    """Starts, kills and restarts the run until it reaches its end."""
    lives: list[Life] = []
    next_kill_step = FIRST_KILL_STEP
    while True:
        hits = sum(life.unfinished_bytes > 0 for life in lives)
        more = hits < WANTED_HITS and len(lives) < MOST_KILLS
        kill_bytes = int(chance.uniform(0.02, 0.95) * step_bytes)
        life = live(run, total_steps, next_kill_step if more else None, kill_bytes)
        lives.append(life)
        describe(life)
        if life.saving_step is None:
            return lives
        # After a hit the resumed run repeats this save undisturbed; a miss is tried again at once.
        next_kill_step = life.saving_step + (STEPS_BETWEEN_KILLS if life.unfinished_bytes else 1)


def live(run: Path, total_steps: int, kill_step: int | None, kill_bytes: int) -> Life:
    """Runs one process to its end, or kills it in the first save at or after `kill_step`.

    It dies as soon as so many bytes of the checkpoint are written.
    """
    life = Life()
    steps_before = len(read_losses(run))
    with start(run, total_steps) as process:
        for line in process.stdout or ():
            if line.startswith("starting at step "):
                life.first_step = int(line.split()[-1])
            step = saved_step(line)
            if step is not None and kill_step is not None and step >= kill_step:
                while not is_committed(run, step) and process.poll() is None:
                    if sum(map(size_bytes, list_unfinished(run))) >= kill_bytes:
                        break
                # Kill the whole process group, so that the data workers end too.
                os.killpg(process.pid, signal.SIGKILL)
                life.saving_step = step
                break
    life.losses = read_losses(run)[steps_before:]
    if life.saving_step is None and process.returncode != 0:
        raise SystemExit(f"the resumed run ended with status {process.returncode}")
    if life.saving_step is not None and not is_committed(run, life.saving_step):
        life.unfinished_bytes = sum(map(size_bytes, list_unfinished(run)))
    return life


def start(run: Path, total_steps: int) -> subprocess.Popen[str]:
    """Starts the training script in a new process with a new process group."""
    command = [sys.executable, str(HERE / "train_nnx.py"), "--directory", str(run)]
    environment = os.environ | {
        # Compile once, not at each start.
        "JAX_COMPILATION_CACHE_DIR": str(run.parent / "jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.Popen(
        [*command, "--steps", str(total_steps)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def saved_step(line: str) -> int | None:
    """The step of a line "saving step N", whose save now runs in the background; None otherwise."""
    return int(line.split()[-1]) if line.startswith("saving step ") else None


def is_committed(run: Path, step: int) -> bool:
    return (run / "checkpoints" / str(step)).exists()


def list_unfinished(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob(".ckpt-tmp.*"))


def size_bytes(folder: Path) -> int:
    """The bytes in a folder, in which a process may write and rename."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def read_losses(run: Path) -> Losses:
    """Every computed step, including repeated ones."""
    path = run / "losses.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(entry["step"], entry["loss"]) for entry in map(json.loads, lines)]


def describe(life: Life) -> None:
    """One row of the table of lives."""
    end = "reached the end"
    if life.saving_step is not None:
        written = f"{life.unfinished_bytes / 1e6:.1f} MB of it on disk"
        how = written if life.unfinished_bytes else "too late"
        end = f"killed while saving step {life.saving_step:3}: {how}"
    print(f"  from step {life.first_step:3}  {len(life.losses):3} steps  {end}", flush=True)


def compare(straight: Path, killed: Path, lives: list[Life]) -> list[str]:
    """Prints what was compared; returns a sentence for each difference."""
    expected = dict(read_losses(straight))
    computed = [pair for life in lives for pair in life.losses]
    differing = sum(expected.get(step) != loss for step, loss in computed)
    missing = len(expected.keys() - dict(computed).keys())
    rows = [("losses", len(computed), differing + missing)]

    ours = json.loads((killed / "fingerprint.json").read_text())
    for group, theirs in json.loads((straight / "fingerprint.json").read_text()).items():
        names = theirs.keys() | ours[group].keys()
        differing = sum(theirs.get(name) != ours[group].get(name) for name in names)
        rows.append((group, len(names), differing))

    print(f"\n  {'killed run against uninterrupted run':38} {'compared':>8} {'differ':>7}")
    for group, compared, differing in rows:
        print(f"  {group:38} {compared:8} {differing:7}")
    hits = sum(life.unfinished_bytes > 0 for life in lives)
    kills = sum(life.saving_step is not None for life in lives)
    leftovers = len(list_unfinished(killed))
    print(f"\nkills: {kills}, of which {hits} hit an unfinished save; left over: {leftovers}")

    failures = [f"{group}: {differing} differ" for group, _, differing in rows if differing]
    if hits < WANTED_HITS:
        failures.append(f"only {hits} kills hit an unfinished save, {WANTED_HITS} were wanted")
    if leftovers:
        failures.append(f"{leftovers} unfinished saves were not cleaned up")
    return failures
