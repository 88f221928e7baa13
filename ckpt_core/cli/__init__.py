"""The command line: ``ckpt --help`` lists the commands.

Exit codes: 0 success; 1 damage, a failed benchmark, a difference, or NaN; 2 wrong arguments (no such checkpoint, a
suite file with errors); 3 worse than the baseline; 130 interrupted.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs ``ckpt`` with the arguments of the process, and exits with its code."""
    try:
        from ckpt_core.cli._app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click", "shellingham"):
            raise
        sys.exit(f"ckpt: the command line needs {error.name}: pip install 'ckpt-core[cli]'")
    sys.exit(run())
