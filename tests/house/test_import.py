"""``import ckpt_core`` costs little beside jax: it imports seven modules of its own, and nothing that jax does not."""

from __future__ import annotations

from typing import Any

LOADED = """
import json, sys
import jax
before = set(sys.modules)
import ckpt_core
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_the_modules_that_the_import_adds(run_python: Any) -> None:
    """Counted, not timed: it is 2 to 4 ms on a quiet machine."""
    added = run_python(LOADED)
    ours = [name for name in added if name.startswith("ckpt_core")]
    assert len(ours) <= 8, ours
    assert {name.partition(".")[0] for name in added} <= {"ckpt_core", "queue", "_queue"}, added
