"""``ckpt``, called in this process and started in one of its own."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import children

Call = Callable[..., tuple[int, str, str]]

# Runs `ckpt` in a fresh interpreter, once for each list of arguments between "+": prints the worst exit code and what was
# imported.
LOADED = """
import itertools, json, sys
from ckpt_core.cli import main
codes = []
for between, arguments in itertools.groupby(sys.argv[1:], "+".__eq__):
    if between:
        continue
    sys.argv = ["ckpt", *arguments]
    try:
        main()
    except SystemExit as ended:
        codes.append(ended.code)
print(json.dumps([max(codes), sorted({name.partition(".")[0] for name in sys.modules})]))
"""

# Saves at a path, and is killed when all is written and nothing has its name yet.
KILLED_SAVE = """
import os, signal, sys
import numpy as np, ckpt_core as ckpt
sys.addaudithook(lambda event, _: event == "os.rename" and os.kill(os.getpid(), signal.SIGKILL))
ckpt.save(sys.argv[1], {"w": np.ones(3)})
"""


def leave_unfinished(path: Path) -> int:
    """A process that was killed in the middle of a save; its number."""
    command = [sys.executable, "-c", KILLED_SAVE, str(path)]
    with subprocess.Popen(command, env=children.environment()) as child:
        assert child.wait(timeout=150) == -signal.SIGKILL
    return child.pid


@pytest.fixture(name="call")
def make_call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs ``ckpt`` in this process; gives (exit code, stdout, stderr)."""
    from ckpt_core.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ckpt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code: Any = ended.value.code or 0
        out, err = capsys.readouterr()
        return code, out, err

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
