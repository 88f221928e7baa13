"""What docs/versions.md says of versions is what pyproject.toml and constraints.txt say."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.support import floors
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "versions.md"
ROW = re.compile(r"^\| ([A-Za-z0-9_-]+) \|[^|]*\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def rows() -> dict[str, tuple[str, str, str]]:
    """Package to its cells on the page: floor, tested, newest tried."""
    found = {
        name: (floor, tested, new)
        for name, floor, tested, new in ROW.findall(PAGE.read_text("utf-8"))
    }
    return {name: cells for name, cells in found.items() if name not in ("Package", "Python")}


def as_number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def test_the_floors_on_the_page_are_those_of_the_package() -> None:
    assert {name: cells[0] for name, cells in rows().items()} == floors.floors()


def test_the_tested_versions_on_the_page_are_those_that_are_held() -> None:
    held = floors.tested()
    assert {name: cells[1] for name, cells in rows().items()} == {
        name: held[name] for name in rows()
    }


@pytest.mark.parametrize("name", floors.floors())
def test_no_version_is_below_one_before_it(name: str) -> None:
    floor, tested, newest = map(as_number, rows()[name])
    assert floor <= tested <= newest


def test_constraints_install_the_floors_and_hold_torch() -> None:
    lines = dict(line.split("==") for line in floors.constraints())
    expected = floors.floors()
    assert lines.pop("torch") == floors.tested()["torch"] != expected.pop("torch")
    assert lines == expected


def test_the_pythons_on_the_page_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = re.findall(r"^\| Python (3\.\d+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    prefix = "Programming Language :: Python :: 3."
    classified = [
        one.removeprefix(prefix[:-2]) for one in project["classifiers"] if one.startswith(prefix)
    ]
    assert named == classified
    assert project["requires-python"] == f">={named[0]}"
