"""What the children do that are killed at a request to a store; each reports what was acknowledged to it."""

import os
import sys
from typing import Any

import child
import numpy as np

import ckpt_core as ckpt
from ckpt_core.cli import main


def tree(n: int) -> dict[str, Any]:
    """As ``tests.support.stores.tree``, which would import pytest."""
    return {"w": np.full((64, 64), n), "small": np.full(2, n), "n": n}


def run(scenario: str, url: str, environment: dict[str, str], pid_file: str) -> None:
    """Does what the scenario says; its requests go to the proxy that the environment names."""
    os.environ.update(environment)
    with open(pid_file, "w") as file:
        file.write(str(os.getpid()))
    globals()[scenario.replace(" ", "_")](url)
    child.report(done=True)


def save(url: str) -> None:
    ckpt.save(f"{url}/1", tree(1))
    child.report(acknowledged=1)


def overwrite(url: str) -> None:
    ckpt.save(f"{url}/1", tree(2), overwrite=True)
    child.report(acknowledged=2)


def loop(url: str) -> None:
    """The second half of a run that keeps two steps; in the background, as is usual."""
    with ckpt.Checkpointer(url, max_to_keep=2) as checkpointer:
        restored = checkpointer.restore_latest(tree(0))
        first = 0 if restored is None else restored.state["n"] + 1
        for step in range(first, 4):
            assert checkpointer.save(step, tree(step))
            checkpointer.wait_until_finished()
            child.report(acknowledged=step)


def delete(url: str) -> None:
    with ckpt.Checkpointer(url) as checkpointer:
        checkpointer.delete(1)
    child.report(acknowledged=None)


def clean(url: str) -> None:
    """What opening a directory for writing does, and ``ckpt gc``."""
    sys.argv = ["ckpt", "gc", url]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise


def go_on(url: str) -> None:
    """Retention and rollback by the next process."""
    with ckpt.Checkpointer(url, max_to_keep=2) as checkpointer:
        checkpointer.rollback_to(0)
        assert checkpointer.save(1, tree(11))
        checkpointer.wait_until_finished()
        child.report(acknowledged=11)
        assert checkpointer.save(2, tree(22))
        checkpointer.wait_until_finished()
        child.report(acknowledged=22)
