"""The example on handwritten digits: killed, started again, the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.children import environment
from tests.support.paths import EXAMPLES, INTEGRATIONS, ROOT


def example(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(INTEGRATIONS / "keras")])
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "keras_fit.py"), *arguments],
        env={**os.environ, "PYTHONPATH": path, "XLA_FLAGS": "", "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_example_demonstrates_what_it_says():
    pytest.importorskip("keras")
    pytest.importorskip("sklearn")
    done = example()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "restored step 30" in done.stdout
    assert "bit for bit" in done.stdout


def test_the_first_block_of_the_readme_is_complete_and_runs_twice(tmp_path: Path):
    """As somebody pastes it: nothing before it, and into a notebook again."""
    readme = INTEGRATIONS / "keras" / "README.md"
    code = readme.read_text().partition("```python\n")[2].partition("```")[0]
    assert "import keras" in code and "load_model" in code
    strict = "import warnings\nwarnings.simplefilter('error')\n"
    done = forked.run(
        f"{strict}{code}\n{code}",
        environment=environment(KERAS_BACKEND="jax"),
        directory=tmp_path,
        imported=("keras",),
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing is left where it was pasted
