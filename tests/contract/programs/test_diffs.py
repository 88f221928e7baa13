"""The diffs on the pages of ``docs/moving`` fit the programs above them: a formatter of one may forget the other."""

from __future__ import annotations

import ast

import pytest

from tests.contract.programs.test_programs import STYLES
from tests.support.programs import blocks, patched


@pytest.mark.parametrize("page", [style.page for style in STYLES])
def test_diffs_apply(page: str) -> None:
    found = blocks(page)
    program = found.pop("train.py")
    diffs = [text for title, text in found.items() if title.startswith("train.py, ")]
    assert diffs
    for diff in diffs:
        ast.parse(patched(program, diff))
