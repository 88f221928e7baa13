"""The command line: ``ckpt ls``, ``show``, ``verify`` and ``bench``.

Exit codes: 0 all is well; 1 what was asked about is not (damage, a failed benchmark); 2 the
question was wrong (no such checkpoint, a suite file with errors); 3 slower than the baseline; 130
interrupted.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs ``ckpt`` with the arguments of the process, and ends it."""
    try:
        from ckpt_core.cli._app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click", "shellingham"):
            raise
        sys.exit(f"ckpt: the command line needs {error.name}: pip install 'ckpt-core[cli]'")
    sys.exit(run())
