"""Plain words: what the field says, and not what a newcomer must guess.

Of the sources and the pages. "Told" stood in them 350 times and meant five things: raised on every process, reported by an
event, written to the log, passed as an argument, known.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import INTEGRATIONS, PACKAGE, ROOT

REPLACED = {
    r"\btold\b": "raised, reported, logged, passed, shown, asked or known: whichever it is",
    r"\buntold\b": "unreported",
    r"\b[Ss]helf\b": "what it holds, such as served parts",
    r"\b[Ss]trangers?\b": "foreign; a connection that has not shown the secret",
    r"\bnone of (its|our|their) business\b": "ignored",
    r"\bat no possible time\b": "never, or unknown",
    r"\btells? (them|it|the [a-z]+) apart\b": "distinguish",
}
ON_DISK = '_DETAIL = "told"'  # a key in the states of Grain pipelines since 0.1.0
SOURCES = [PACKAGE, *sorted(INTEGRATIONS.glob("*/ckpt_*")), ROOT / "benchmarks"]
FILES = sorted(
    [
        *(file for folder in SOURCES for file in folder.rglob("*.py")),
        *(file for file in ROOT.glob("docs/**/*.md")),
        *INTEGRATIONS.glob("*/README.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
)


def found_in(file: Path, pattern: str) -> list[str]:
    lines = file.read_text().splitlines()
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for number, line in enumerate(lines, 1)
        if re.search(pattern, line) and line != ON_DISK
    ]


@pytest.mark.parametrize("pattern", REPLACED)
def test_a_replaced_word_does_not_come_back(pattern: str) -> None:
    found = [line for file in FILES for line in found_in(file, pattern)]
    assert not found, (f"write {REPLACED[pattern]}", found)


def test_the_check_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    file = tmp_path / "a.py"
    file.write_text("x = 1  # the others are told\n# a shelf, a stranger: none of its business\n")
    assert [len(found_in(file, pattern)) for pattern in REPLACED] == [1, 0, 1, 1, 1, 0, 0]
