"""Every Python block of the READMEs runs, in order, as a reader would run it.

Blocks inside of HTML comments are run as well: they set up what the text takes for granted.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READMES = [ROOT / "README.md", *sorted((ROOT / "integrations").glob("*/README.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(text: str) -> list[tuple[int, str]]:
    """(line of the fence, code) of each Python block."""
    return [(text.count("\n", 0, found.start()) + 1, found[1]) for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(readme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    blocks = blocks_of(readme.read_text())
    assert blocks, "no Python block: has the fence changed?"
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    for line, code in blocks:
        # Empty lines in front make line numbers of tracebacks those of the README.
        exec(compile("\n" * line + code, str(readme), "exec"), namespace)


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
    (line, code), *_ = blocks_of("text\n\n```python\nx = 1\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("\n" * line + code, "README.md", "exec"), {})
    assert caught.tb.tb_next is not None
    assert caught.tb.tb_next.tb_lineno == 5
