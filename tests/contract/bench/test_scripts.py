"""The scripts in benchmarks/ run, on small things; what they print is measured elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import BENCHMARKS, PACKAGE

SMALL = {
    "compare_codecs.py": "--steps 2 --width 16 --rounds 1",
    "every_step.py": "--mib 4 --steps 4 --every 2 --repeats 1 --batch 8 --tries 1",
    "foreign_weights.py": "--mib 4 --tensor-mib 1 --repeats 1",
    "frozen_leaves.py": "--leaves 8 --leaf-mib 1 --rounds 1",
    "goodput.py": "--hosts 8,4096 --days 2 --runs 1",
    "gpu_snapshot.py": "--mib 8 --restore-mib 8 --leaves 4 --rounds 1 --steps 2 --width 64 --step-secs 0.01 --lead-secs 0.02",
    "keras_callback.py": "--width 64 --rounds 1 --step-rounds 2 --steps 20 --saves 3",
    "latencies.py": "--rounds 1 --steps 20 --leaves 50",
    "many_clients.py": "--processes 3 --partners",
    "lost_host.py": "--mib 16 --processes 2 --repeats 1",
    "memory.py": "--gib 0.01 --leaf-mib 1 --only save,load",
    "orbax_face.py": "--rounds 1 --divide 100 --only 5,000",
    "orbax_clients.py": "",
    "restart.py": "--gib 0.01 --leaf-mib 1 --repeats 1",
    "simulate_messages.py": "--processes 64",
    "simulate_planning.py": "--processes 16 --clients 4 --layers 2 --arrays 2",
    "startup_overlap.py": "--mib 8 --layers 2 --repeats 1",
    "step_disturbance.py": "--mib 16 --rounds 1 --width 64",
    "stores.py": "--rounds 1 --sizes",
}
_MORE = {"stores.py": ["4 x 64 KiB"], "orbax_clients.py": [str(PACKAGE)]}  # may have spaces


def test_every_script_is_run() -> None:
    scripts = {path.name for path in BENCHMARKS.glob("*.py")}
    assert scripts - {"shared.py"} == set(SMALL)


@pytest.mark.parametrize("script", SMALL)
def test_the_script_runs(script: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *SMALL[script].split(), *_MORE.get(script, [])],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip()
