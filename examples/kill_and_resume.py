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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_core.testing import assert_same

HERE = Path(__file__).resolve().parent
WANTED_HITS = 5
MOST_KILLS = 12
STEPS_BETWEEN_KILLS = 16


def demonstrate(train: Callable[..., Any], directory: Path, total_steps: int) -> int:
    """Runs the whole demonstration below `directory`; returns the exit status."""
    started = time.monotonic()
    directory = directory.expanduser().resolve()
    straight, killed = directory / "straight", directory / "killed"
    for run in (straight, killed):
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)

    print("run 1: without interruption, about a minute on two cores", flush=True)
    live(straight, total_steps)
    step_bytes = max(map(size_bytes, (straight / "checkpoints").glob("[0-9]*")))
    print(f"  {time.monotonic() - started:.0f} s; a checkpoint has {step_bytes / 1e6:.1f} MB")

    seed = random.randrange(1000)
    print(f"run 2: the same, killed with SIGKILL while it writes (seed {seed})", flush=True)
    kills, hits = run_with_kills(killed, total_steps, step_bytes, random.Random(seed))

    leftovers = len(list_unfinished(killed))
    print(f"kills: {kills}, of which {hits} hit an unfinished save; left over: {leftovers}")

    failures = compare(train, straight, killed, total_steps)
    if hits < WANTED_HITS:
        failures.append(f"only {hits} kills hit an unfinished save, {WANTED_HITS} were wanted")
    if leftovers:
        failures.append(f"{leftovers} unfinished saves were not cleaned up")
    print(f"total: {time.monotonic() - started:.0f} s")
    for failure in failures:
        print(f"FAILED: {failure}")
    print("FAILED" if failures else "OK: every bit of the killed run equals the uninterrupted run")
    return 1 if failures else 0


def run_with_kills(
    run: Path, total_steps: int, step_bytes: int, chance: random.Random
) -> tuple[int, int]:
    """Starts, kills and restarts the run until it reaches its end; counts kills, and those of unfinished saves."""
    kills = hits = next_kill_step = 0  # the first save, so that the resumed run finds no checkpoint
    while True:
        more = hits < WANTED_HITS and kills < MOST_KILLS
        kill_bytes = int(chance.uniform(0.02, 0.95) * step_bytes)
        step, unfinished_bytes = live(
            run, total_steps, next_kill_step if more else None, kill_bytes
        )
        if step is None:
            return kills, hits
        kills += 1
        hits += unfinished_bytes > 0
        how = f"{unfinished_bytes / 1e6:.1f} MB of it on disk" if unfinished_bytes else "too late"
        print(f"  killed while saving step {step}: {how}", flush=True)
        # After a hit the resumed run repeats this save undisturbed; a miss is tried again at once.
        next_kill_step = step + (STEPS_BETWEEN_KILLS if unfinished_bytes else 1)


def live(
    run: Path, total_steps: int, kill_step: int | None = None, kill_bytes: int = 0
) -> tuple[int | None, int]:
    """Runs one process to its end, or kills it in the first save at or after `kill_step`.

    It dies as soon as so many bytes of the checkpoint are written. Returns the step of that save, and how many bytes of
    it were there.
    """
    with start(run, total_steps) as process:
        for line in process.stdout or ():
            print(f"  {line}", end="", flush=True)
            if kill_step is None or not line.startswith("saving step "):
                continue
            step = int(line.split()[-1])
            if step < kill_step:
                continue
            while not is_committed(run, step) and process.poll() is None:
                if sum(map(size_bytes, list_unfinished(run))) >= kill_bytes:
                    break
            # Kill the whole process group, so that the data workers end too.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            late = is_committed(run, step)
            return step, 0 if late else sum(map(size_bytes, list_unfinished(run)))
    if process.returncode != 0:
        raise SystemExit(f"the run ended with status {process.returncode}")
    return None, 0


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


def read_losses(run: Path) -> list[tuple[int, float]]:
    """Step and loss of every computed step, including repeated ones."""
    entries = map(json.loads, (run / "losses.jsonl").read_text().splitlines())
    return [(entry["step"], entry["loss"]) for entry in entries]


def compare(train: Callable[..., Any], straight: Path, killed: Path, total_steps: int) -> list[str]:
    """Prints what was compared; returns a sentence for each difference."""
    expected, computed = dict(read_losses(straight)), read_losses(killed)
    differing = sum(expected.get(step) != loss for step, loss in computed)
    missing = len(expected.keys() - dict(computed).keys())
    print(f"losses: {len(computed)} compared, {differing} differ, {missing} are missing")
    failures = [f"{differing} losses differ, {missing} are missing"] if differing + missing else []
    try:
        expected = final_state(train, straight, total_steps)
        assert_same(final_state(train, killed, total_steps), expected)
        print("model, optimizer, position and next batches of the data: compared")
    except AssertionError as error:
        failures.append(str(error))
    return failures


def final_state(train: Callable[..., Any], run: Path, total_steps: int) -> dict[str, Any]:
    """What a run ended with: started again, it restores that, and has nothing to train."""
    model, optimizer, data = train(run / "checkpoints", lambda *_, **__: None, total_steps)
    state = {"model": model, "optimizer": optimizer, "data": data}
    return state | {"next batches": [next(data) for _ in range(4)]}
