"""Whatever several processes save in a test, the same program restores in new processes.

A save that is acknowledged and never loads is seen at the restart only: the tests of the save were green for a
year, since they looked at what was written with other eyes (one process, ``as_numpy=True``, another target).
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.paths import ROOT

TESTS = ROOT / "tests"
_LAUNCHES = re.compile(r"^from tests\.support\.launch import .*\blaunch\b", re.MULTILINE)
_SAVES = re.compile(r"\bsave(_async)?\(")
EARLIER = {
    "contract/frameworks/test_grain_processes.py",
    "contract/frameworks/test_torchax_journey.py",
    "contract/items/test_files.py",
    "contract/orbax_compat/test_processes.py",
    "contract/orbax_face/test_handlers_in_processes.py",
    "contract/orbax_face/test_processes.py",
    "contract/processes/test_a_save_fails_on_one.py",  # about saves that are refused
    "contract/processes/test_any_number_to_any_other.py",
    "contract/processes/test_begun_again.py",
    "contract/processes/test_broadcast.py",
    "contract/processes/test_different_loads.py",
    "contract/processes/test_different_trees.py",
    "contract/processes/test_error_types.py",
    "contract/processes/test_far_apart_or_alone.py",
    "contract/processes/test_lost_hosts.py",
    "contract/processes/test_lost_process.py",
    "contract/processes/test_one_fails_alone.py",
    "contract/processes/test_one_history.py",
    "contract/processes/test_parts_in_trouble.py",
    "contract/processes/test_pending_fails.py",
    "contract/processes/test_stop_signals.py",
    "contract/processes/test_stores.py",
    "contract/processes/test_stuck_and_blocked.py",
    "contract/processes/test_takeover.py",
    "contract/processes/test_tiers.py",
    "contract/processes/test_together.py",
    "contract/processes/test_two_processes.py",
    "unit/processes/test_different_calls.py",
    "unit/processes/test_partners.py",
    "unit/processes/test_slow_directories.py",
}
"""Older than the rule, or about something else than what a save takes; none is added."""


def saving_with_several() -> dict[str, bool]:
    """Path of each test file that saves with several processes -> whether it also restores by the same program."""
    found: dict[str, bool] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text()
        if _LAUNCHES.search(text) and _SAVES.search(text):
            found[file.relative_to(TESTS).as_posix()] = (
                "from tests.support.same_program import" in text
            )
    return found


def test_what_several_processes_save_is_restored_by_the_same_program() -> None:
    found = saving_with_several()
    missing = {name for name, restores in found.items() if not restores}
    assert missing <= EARLIER, "use tests.support.same_program.comes_back"
    assert missing >= EARLIER, "no longer an exception: take it out of EARLIER"


def test_the_rule_sees_such_files() -> None:
    assert len(saving_with_several()) >= len(EARLIER) > 5
    assert Path(TESTS / "support" / "same_program.py").exists()
