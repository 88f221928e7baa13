"""Files of tests stay small enough to be read, and lie where their subject is."""

import ast
from pathlib import Path

from tests.support import sums
from tests.support.paths import ROOT

TESTS = ROOT / "tests"
BRIDGES = {"places", "replacing", "seams", "stores"}
"""Helpers of contract tests that know private names: whoever rewrites the inside carries these over, and nothing else."""
MAX_LINES = 600


def test_no_file_of_tests_is_long():
    lines = {
        file.relative_to(TESTS).as_posix(): len(file.read_text().splitlines())
        for file in TESTS.rglob("*.py")
    }
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}, "split them"


def test_every_test_lies_in_a_folder_that_is_a_package():
    """One package, so that files of the same name are told apart and no folder is on `sys.path`."""
    files = list(TESTS.rglob("test_*.py"))
    assert [file.name for file in files if file.parent == TESTS] == []
    assert {file.parent for file in files if not (file.parent / "__init__.py").exists()} == set()


def test_a_contract_knows_nothing_private():
    """Neither by itself nor through its helpers, so that a rewrite of the inside changes nothing but the bridges."""
    todo, seen = [*(TESTS / "contract").rglob("*.py")], set[Path]()
    while todo:
        file = todo.pop()
        if file not in seen and file.exists() and file.stem not in BRIDGES:
            seen.add(file)
            todo += imported(ast.parse(file.read_text()))
    known = [
        one.relative_to(TESTS).as_posix()
        for one in seen
        if sums.imports_private_names(one.read_text())
    ]
    assert sorted(known) == []


def imported(tree: ast.AST) -> list[Path]:
    """Files of tests that a module imports, and some that are not there."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{one.name}" for one in node.names)]
        elif isinstance(node, ast.Import):
            names += [one.name for one in node.names]
    return [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")]
