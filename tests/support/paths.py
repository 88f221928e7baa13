"""Where things lie in the working tree."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ckpt_core"
BENCHMARKS = ROOT / "benchmarks"
EXAMPLES = ROOT / "examples"
INTEGRATIONS = ROOT / "integrations"
