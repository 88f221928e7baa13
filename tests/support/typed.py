"""What pyright says of a user's script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def diagnostics(folder: Path, text: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything that pyright tells of a script; skips the test where it does not run.

    Args:
        folder: for the script and the settings.
        text: the script.
        settings: of ``pyrightconfig.json``.
    """
    pytest.importorskip("pyright")
    (folder / "script.py").write_text(text)
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, "script.py"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not run here: {(done.stderr or done.stdout)[-200:]}")
    return json.loads(done.stdout)["generalDiagnostics"]
