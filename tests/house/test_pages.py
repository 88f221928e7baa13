"""The pages that promise to be complete are: every error, every promise, and no count above the truth."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections import Counter

import pytest

import ckpt_core as ckpt
from tests.support.paths import ROOT

DOCS = ROOT / "docs"


def test_every_public_error_has_an_entry() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    entries = dict(re.findall(r"^## `(\w+)`(?: \(`(\w+)`\))?$", text, re.MULTILINE))
    public = {name: getattr(ckpt, name) for name in ckpt.__all__}
    errors = {
        name: value
        for name, value in public.items()
        if inspect.isclass(value) and issubclass(value, ckpt.CheckpointError)
    }
    assert len(errors) >= 9
    assert set(entries) - {"TypeError"} == set(errors)
    for name, builtin in entries.items():
        bases = [base.__name__ for base in getattr(errors.get(name), "__bases__", ())]
        assert not builtin or builtin in bases, name


def test_every_kind_of_mismatch_is_told() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    kinds = re.findall(r"``(\w+)``", (ckpt.Mismatch.__doc__ or "").partition("saved:")[0])
    assert len(kinds) >= 8
    for kind in kinds:
        assert f"`{kind}`" in text, kind


@pytest.mark.slow
def test_the_page_of_the_promises_counts_no_test_that_is_not_there() -> None:
    text = (DOCS / "promises.md").read_text()
    promised = re.findall(r"^\d\. \*\*", (DOCS / "guide" / "promises.md").read_text(), re.MULTILINE)
    assert len(re.findall(r"^## \d\. ", text, re.MULTILINE)) == len(promised)
    told = {file: int(count) for file, count in re.findall(r"`(tests/[\w/.]+)` \((\d+)", text)}
    assert len(told) > 40
    there: Counter[str] = Counter()
    for line in collected(list(told)):
        file = line.partition("::")[0]
        there[file] += 1
        there[file.rpartition("/")[0] + "/"] += 1
    wrong = {file: (count, there[file]) for file, count in told.items() if there[file] < count}
    assert not wrong, "on the page, and collected"


def collected(paths: list[str]) -> list[str]:
    """What pytest finds there, one line a case."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if "::" in line]
