"""The scripts in benchmarks/ run, on small things; what they print is measured elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import BENCHMARKS

SMALL = {
    "every_step.py": "--mib 4 --steps 4 --every 2 --repeats 1 --batch 8 --tries 1",
    "gpu_snapshot.py": "--mib 8 --leaves 4 --rounds 1 --steps 2 --width 64 --step-secs 0.01 --lead-secs 0.02",
    "latencies.py": "--rounds 1 --steps 20 --leaves 50",
    "memory.py": "--gib 0.01 --leaf-mib 1 --only save,load",
    "publishing.py": "--mb 2 --rounds 1 --rates 3e-6",
    "restart.py": "--gib 0.01 --leaf-mib 1 --repeats 1",
    "stores.py": "--rounds 1 --sizes",
}
_MORE = {"stores.py": ["4 x 64 KiB"]}  # may have spaces


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
