"""``ckpt``, called in this process and started in one of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import children

Call = Callable[..., tuple[int, str, str]]

# Runs `ckpt` with its arguments in a fresh interpreter: prints the exit code and what was imported.
LOADED = """
import json, sys
from ckpt_core.cli import main
sys.argv = ["ckpt", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    code = ended.code
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


@pytest.fixture(name="call")
def make_call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs ``ckpt`` in this process; gives (exit code, stdout, stderr)."""
    from ckpt_core.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ckpt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def start(
    *arguments: object, text: bool = True, timeout_secs: float = 150, **environment: str
) -> Any:
    """Runs ``ckpt`` in a process of its own, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "ckpt_core.cli", *map(str, arguments)],
        env=children.environment(**environment),
        capture_output=True,
        text=text,
        timeout=timeout_secs,
    )
