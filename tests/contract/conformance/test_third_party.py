"""A stranger's adapter: installed through its entry point, found, and passed by the suite.

The distribution is written to a temporary directory as pip would install it, and the author's tests
run in a process of their own, where it is on the path.
"""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
AUTHOR = HERE / "third_party"
FAULTS = [
    ("alias", "the_snapshot_is_of_the_call", "the snapshot differs at beads"),
    ("commit", "committedness_is_kept", "rows/0 was uncommitted and came back committed"),
    ("creep", "what_fails_later_names_what_was_set", "differs at moves"),
    ("cut", "goes_on_bit_for_bit", "training after the restore differs at step 0"),
    ("cut", "training_resumes_exactly", "differs at step 2, outcome"),
    ("forget", "in_a_new_process", "training in a new process differs at after/rows/0"),
    ("gather", "shardings_are_kept", "every array on one device"),
    ("same", "load_gives_a_copy_or_refuses", "load changed the object that it was given"),
    ("shallow", "load_gives_a_copy_or_refuses", "training with the copy changed the object"),
    ("touch", "comes_back_bit_for_bit", "saving changed the object"),
    ("touch", "damage_is_found_and_changes_nothing", "differs at moves"),
]
TESTS = [
    "TestAbacus",
    *(f"TestFaulty::test_{test}[{fault}]" for fault, test, _ in FAULTS),
    "TestWithoutAdapter::test_comes_back_bit_for_bit",
    "TestTheSame::test_comes_back_bit_for_bit",
    "TestTheSame::test_in_a_new_process",
    "TestUnfinished::test_comes_back_bit_for_bit",
]


def install(site: Path) -> None:
    """Two modules and their metadata, as they lie in a site-packages."""
    info = site / "ckpt_abacus-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ckpt-abacus\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckpt_core.adapters]\nabacus = ckpt_abacus:ADAPTER\n")
    for name in ("abacus.py", "ckpt_abacus.py"):
        shutil.copy(AUTHOR / name, site)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Class -> test -> passed, skipped, or the message of its failure."""
    site = tmp_path_factory.mktemp("site")
    install(site)
    report = site / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--rootdir={site}"]
    tests = [f"{AUTHOR / 'abacus_suite.py'}::{test}" for test in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--basetemp={site / 'base'}", *tests],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])},
        cwd=site,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        child = next(iter(case), None)
        message = "passed" if child is None else f"{child.tag}: {child.get('message')}"
        found.setdefault(case.get("classname", "").rpartition(".")[2], {})[case.get("name", "")] = (
            message
        )
    return found


def test_it_passes_the_suite(outcomes):
    assert len(outcomes["TestAbacus"]) == 15
    assert {name: text for name, text in outcomes["TestAbacus"].items() if text != "passed"} == {}


@pytest.mark.parametrize(("fault", "test", "message"), FAULTS)
def test_it_finds_what_is_wrong(fault, test, message, outcomes):
    assert message in outcomes["TestFaulty"][f"test_{test}[{fault}]"]


def test_it_says_what_is_missing(outcomes):
    without = outcomes["TestWithoutAdapter"]["test_comes_back_bit_for_bit"]
    assert "object" in without and not without.startswith("passed")
    nothing = outcomes["TestTheSame"]["test_comes_back_bit_for_bit"]
    assert "nothing would be tested" in nothing
    local = outcomes["TestTheSame"]["test_in_a_new_process"]
    assert "top of a module" in local
    assert "fixture `make`" in outcomes["TestUnfinished"]["test_comes_back_bit_for_bit"]
