"""What pyright says of a user's script."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def diagnostics_of(
    folder: Path, texts: dict[str, str], settings: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Everything that pyright tells of each script, in one run; skips the test where it does not run.

    Args:
        folder: for the scripts and the settings.
        texts: the scripts, by the names of their files.
        settings: of ``pyrightconfig.json``.
    """
    pytest.importorskip("pyright")
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, *texts]
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
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] >= len(texts)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in texts}
    for one in told["generalDiagnostics"]:
        found[Path(one["file"]).name].append(one)
    return found
