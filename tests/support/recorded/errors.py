"""The class of each error on every process, where a test makes one process fail."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import launch
from tests.support.paths import ROOT

FAILING = """
contract/processes/test_error_types.py
contract/processes/test_one_fails_alone.py
contract/processes/test_parts_in_trouble.py
"""


def errors() -> Iterator[str]:
    """What calls raised in each process of each test of these files: classes, and "none"."""
    lines: list[str] = []
    real = launch.reports

    def noted(ended: Any) -> Any:
        found = real(ended)
        test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].rpartition(" ")[0]
        lines.append(f"# {test}")
        for index, told in enumerate(found):
            shown = (f"{name}={kind}" for name, kind in _classes(told))
            lines.append(f"  process {index}: {' '.join(shown)}")
        return found

    launch.reports = noted
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        files = [str(ROOT / "tests" / name) for name in FAILING.split()]
        chosen = f"-q -p no:cacheprovider -W ignore --basetemp={folder}/tests"
        assert pytest.main([*chosen.split(), *files]) == 0
    yield from lines


def _classes(told: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(told, dict) and "type" in told:
        yield name, told["type"] + (f" absent {told['absent']}" if told.get("absent") else "")
    elif isinstance(told, dict | list):
        pairs = told.items() if isinstance(told, dict) else enumerate(told)
        for key, value in pairs:
            yield from _classes(value, f"{name}.{key}".lstrip(".").replace(" ", "_"))
    elif told is None or isinstance(told, int) or f"{told}".isidentifier():
        yield name, told
