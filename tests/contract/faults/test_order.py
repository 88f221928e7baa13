"""The order of a save's file operations: all is durable before it has its name, and then the name is."""

from pathlib import Path

import pytest

from tests.contract.faults.fixtures import make_pool, make_shim  # noqa: F401 (fixtures)
from tests.contract.faults.harness import Op

pytestmark = pytest.mark.faults


def test_all_is_synced_before_the_rename_and_the_name_after_it(pool, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    outcome = pool.run("scenarios:save", ["nested", str(root)], path=str(root), fresh=True)
    assert outcome.exit_code == 0, str(outcome)
    target = root / "a" / "b" / "second"
    (named,) = (at for at, op in enumerate(outcome.ops) if op.path.endswith(f" -> {target}"))
    assert _unsynced(outcome.ops[:named]) == {target.parent}  # which has the attempt's name
    assert not _unsynced(outcome.ops)


def _unsynced(ops: list[Op]) -> set[Path]:
    """Files with bytes, and directories with names, that a power cut would take."""
    found: set[Path] = set()
    for op in ops:
        path = Path(op.path.rpartition(" -> ")[2])
        if op.name == "fsync":
            found.discard(path)
        else:
            found.add(path if op.name == "write" else path.parent)
    return found
