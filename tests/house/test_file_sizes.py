"""Files of tests stay small enough to be read, and lie where their subject is."""

from __future__ import annotations

from tests.support.paths import ROOT

TESTS = ROOT / "tests"
MAX_LINES = 600
SHADOWED = {"flax", "grain", "jax", "keras", "optax", "orbax", "torch", "torchax"}


def test_no_file_of_tests_is_long() -> None:
    lines = {
        file.relative_to(TESTS).as_posix(): len(file.read_text().splitlines())
        for file in TESTS.rglob("*.py")
    }
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}, "split them"


def test_every_test_lies_in_a_folder_that_is_a_package() -> None:
    """One package, so that files of the same name are told apart and no folder is on `sys.path`."""
    files = list(TESTS.rglob("test_*.py"))
    assert [file.name for file in files if file.parent == TESTS] == []
    assert {file.parent for file in files if not (file.parent / "__init__.py").exists()} == set()


def test_no_folder_hides_a_framework() -> None:
    shadowing = [folder for folder in TESTS.rglob("*") if folder.name in SHADOWED]
    assert [str(one) for one in shadowing if "golden" not in one.parts] == []  # no code is there
