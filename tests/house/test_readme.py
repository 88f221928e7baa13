"""Every Python block of the READMEs runs, in order, as a reader would run it.

Each README has an interpreter of its own: some of what they show changes the whole process
(`torchax.enable_globally()`), and no reader has run the other READMEs before. Blocks inside of HTML
comments are run as well: they set up what the text takes for granted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.children import compiling_once, environment
from tests.support.paths import INTEGRATIONS, ROOT

READMES = [
    ROOT / "README.md",
    ROOT / "docs" / "foreign_weights.md",
    *sorted(INTEGRATIONS.glob("*/README.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

RUN = """
import json, sys, warnings
warnings.simplefilter("error")

class Killed(Exception):
    pass

def killed_at_the_third(save):
    def save_or_die(*arguments, **named):
        saves.append(1)
        if len(saves) == 3:
            raise Killed
        return save(*arguments, **named)
    return save_or_die

which = sys.argv[2]
if which == "killed":
    import ckpt_core
    ckpt_core.Checkpointer.save = killed_at_the_third(ckpt_core.Checkpointer.save)
namespace = {"__name__": "readme"}
killed = False
for code in json.load(sys.stdin):
    saves = []
    try:
        exec(compile(code, sys.argv[1], "exec"), namespace)
    except Killed:
        killed = True
    except Exception as error:
        # what comes after a training that was killed may lack its steps; a second run finds what the
        # first one wrote, but what can be resumed must run
        exists = isinstance(error, FileExistsError)
        if not killed and not (which == "again" and exists and "restore_latest" not in code):
            raise
"""


def blocks_of(text: str) -> list[tuple[int, str]]:
    """(line of the fence, code) of each Python block."""
    return [(text.count("\n", 0, found.start()) + 1, found[1]) for found in BLOCK.finditer(text)]


def run_blocks(
    readme: Path, directory: Path, which: str = "first"
) -> subprocess.CompletedProcess[str]:
    """The README's blocks, one after the other in one namespace of a fresh interpreter.

    What is compiled is kept beside `directory`, for the next interpreter.
    """
    blocks = blocks_of(readme.read_text())
    assert blocks, "no Python block: has the fence changed?"
    # Empty lines in front make line numbers of tracebacks those of the README.
    codes = ["\n" * line + code for line, code in blocks]
    return subprocess.run(
        [sys.executable, "-c", RUN, str(readme), which],
        input=json.dumps(codes),
        cwd=directory,
        env=environment(**compiling_once(directory.parent / "jax-cache")),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(readme: Path, tmp_path: Path):
    done = run_blocks(readme, tmp_path)
    assert done.returncode == 0, done.stderr


RESUMING = [
    pytest.param(
        path,
        id=str(path.relative_to(ROOT)),
        marks=[] if path.parent == ROOT else pytest.mark.slow,
    )
    for path in READMES
    if "restore_latest(" in path.read_text()
]


@pytest.mark.parametrize("readme", RESUMING)
def test_what_resumes_is_killed_and_runs_again(readme: Path, tmp_path: Path):
    """Each training is killed at its third save; the second run of the same text goes on from there."""
    done = run_blocks(readme, tmp_path, "killed")
    assert done.returncode == 0, done.stderr
    done = run_blocks(readme, tmp_path, "again")
    assert done.returncode == 0, done.stderr


def test_the_first_screen():
    """The two commands and the example come before the reader has to scroll."""
    screen = (ROOT / "README.md").read_text().partition("## ")[0]
    assert "make demo" in screen
    assert "make test" in screen
    assert "restore_latest" in screen


def test_blocks_are_found():
    text = "a\n```python\nx = 1\n```\n<!--\n```python\ny = 2\n```\n-->\n```\nmake\n```\n"
    assert blocks_of(text) == [(2, "x = 1\n"), (6, "y = 2\n")]


def test_a_failing_block_names_its_line(tmp_path: Path):
    readme = tmp_path / "README.md"
    readme.write_text("text\n\n```python\nx = 1\n```\nmore\n```python\ny = x\ny / 0\n```\n")
    done = run_blocks(readme, tmp_path)
    assert done.returncode == 1
    assert f'{readme}", line 9' in done.stderr
    assert "y / 0" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_warnings_fail_a_block(tmp_path: Path):
    readme = tmp_path / "README.md"
    readme.write_text("```python\nimport warnings\nwarnings.warn('old')\n```\n")
    assert run_blocks(readme, tmp_path).returncode == 1
