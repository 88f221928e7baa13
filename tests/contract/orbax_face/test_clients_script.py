"""``benchmarks/orbax_clients.py``: which of Orbax's names a program uses, by syntax tree."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.support.paths import ROOT

pytest.importorskip("orbax.checkpoint")
_spec = importlib.util.spec_from_file_location(
    "orbax_clients", ROOT / "benchmarks/orbax_clients.py"
)
assert _spec is not None
assert _spec.loader is not None
clients = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clients)

PROGRAM = """
import orbax.checkpoint as ocp
import orbax.checkpoint
from orbax import checkpoint
from orbax.checkpoint import v1, utils as of_orbax
from orbax.checkpoint.checkpoint_managers import LatestN, BestN

def save(manager, ocp_like):
    manager.save(1, args=ocp.args.Composite(a=ocp.args.StandardSave({})))
    ocp_like.args.StandardSave(1)
    return orbax.checkpoint.CheckpointManager, checkpoint.CheckpointManager
keep = LatestN(3), of_orbax.checkpoint_steps, v1.training.Checkpointer, ocp._src.tree.utils.is_empty_node
"""
USES = {
    "args.Composite": 1,
    "args.StandardSave": 1,
    "CheckpointManager": 2,
    "checkpoint_managers.LatestN": 1,
    "checkpoint_managers.BestN": 1,
    "utils.checkpoint_steps": 1,
    "v1.training.Checkpointer": 1,
}


def test_each_use_is_counted_by_its_name(tmp_path):
    clone = tmp_path / "some+one"
    (clone / "tests").mkdir(parents=True)
    (clone / "train.py").write_text(PROGRAM)
    (clone / "tests" / "train.py").write_text(PROGRAM)
    (clone / "train_test.py").write_text(PROGRAM)
    cells = [
        {
            "cell_type": "code",
            "source": ["if True:\n", "  %pip install orbax\n", *PROGRAM.splitlines(True)],
        }
    ]
    (clone / "train.ipynb").write_text(json.dumps({"cells": cells}))
    found = clients.count([clone])
    assert {name: dict(one) for name, one in found.items() if "_src" not in name} == {
        name: {"some/one": 2 * uses} for name, uses in USES.items()
    }
    assert sum(one.total() for name, one in found.items() if "_src" in name) == 2


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("CheckpointManager", "offered"),
        ("checkpoint_managers.LatestN", "offered"),
        ("v1.training.Checkpointer", "offered"),
        ("experimental.emergency.checkpoint_manager.CheckpointManager", "refused"),
        ("_src.tree.utils", "refused"),
        ("Transform", "refused"),
        ("multihost.no_such_function", "not of Orbax 0.12"),
    ],
)
def test_what_becomes_of_a_name(name, what):
    assert clients.status(name) == what
