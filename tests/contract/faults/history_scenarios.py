"""Calls that change which steps a run has, on runs of one tier and of two; what may be found after each.

A child makes one of them under the shim, and is killed. The values say who wrote a step: ``first`` before the
call, ``second`` in it.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import ckpt_core as ckpt

Steps = dict[int, int]
"""Step -> the value that it holds."""
STEPS = {
    "one tier": (1, 2, 3, 5),
    "local only": (100, 101, 102, 104),
    "both tiers": (100, 200, 300, 500),
    "persistent only": (100, 200, 300, 500),
}
UNUSED = {5: 4, 104: 103, 500: 400}
"""For the last step of a layout a number before it that no step has."""


def first(step: int) -> int:
    """What a step holds that was saved before the call."""
    return step * 10


def second(step: int) -> int:
    """What a step holds that was saved in the call."""
    return step * 10 + 1


def tree(value: int) -> dict[str, Any]:
    return {"w": np.full(300, value), "n": value}


def opened(root: str, layout: str, host: str = "host", **more: Any) -> ckpt.Checkpointer:
    """The run on one of its hosts, with that host's local directory if it has a name."""
    options = ckpt.Options(
        persist_policy=None if layout == "one tier" else ckpt.when.every_steps(100),
        local_max_to_keep=10,
        durable=False,
    )
    local = None if layout == "one tier" or not host else f"{root}/{host}"
    more = {"asynchronous": False} | more
    return ckpt.Checkpointer(f"{root}/run", local_directory=local, options=options, **more)


def save(checkpointer: ckpt.Checkpointer, step: int, value: int, **more: Any) -> None:
    assert checkpointer.save(step, tree(value), metadata={"value": value}, **more), step
    checkpointer.wait_until_finished()


@dataclass(frozen=True)
class Case:
    """One call, given the four steps of a layout; what there may be before it, in between, and after; what goes before."""

    call: Callable[[ckpt.Checkpointer, tuple[int, ...]], object]
    found: Callable[[tuple[int, ...]], list[Steps]]
    before: Callable[[ckpt.Checkpointer, tuple[int, ...]], object] = lambda c, s: None


def _firsts(*steps: int) -> Steps:
    return {step: first(step) for step in steps}


def _restore(checkpointer: ckpt.Checkpointer, step: int) -> None:
    restored = checkpointer.restore(step, state=tree(0))
    assert restored["state"]["n"] == first(step)


CASES = {
    "rollback": Case(lambda c, s: c.rollback_to(s[1]), lambda s: [_firsts(*s), _firsts(*s[:2])]),
    "rollback to the first": Case(
        lambda c, s: c.rollback_to(s[0]), lambda s: [_firsts(*s), _firsts(*s[:1])]
    ),
    "rollback by one": Case(
        lambda c, s: c.rollback_to(s[2]), lambda s: [_firsts(*s), _firsts(*s[:3])]
    ),
    "delete newest": Case(lambda c, s: c.delete(s[3]), lambda s: [_firsts(*s), _firsts(*s[:3])]),
    "delete middle": Case(
        lambda c, s: c.delete(s[1]), lambda s: [_firsts(*s), _firsts(s[0], s[2], s[3])]
    ),
    "delete first": Case(lambda c, s: c.delete(s[0]), lambda s: [_firsts(*s), _firsts(*s[1:])]),
    "overwrite newest": Case(
        lambda c, s: save(c, s[3], second(s[3]), overwrite=True),
        lambda s: [_firsts(*s), _firsts(*s) | {s[3]: second(s[3])}],
    ),
    "overwrite middle": Case(
        lambda c, s: save(c, s[1], second(s[1]), overwrite=True),
        lambda s: [_firsts(*s), _firsts(*s) | {s[1]: second(s[1])}],
    ),
    "save after an older one": Case(
        lambda c, s: save(c, s[2], second(s[2])),
        lambda s: [_firsts(*s), _firsts(*s[:2]), _firsts(*s[:2]) | {s[2]: second(s[2])}],
        lambda c, s: _restore(c, s[1]),
    ),
    "save of another number after an older one": Case(
        lambda c, s: save(c, UNUSED[s[3]], second(UNUSED[s[3]])),
        lambda s: [
            _firsts(*s),
            _firsts(s[0]),
            _firsts(s[0]) | {UNUSED[s[3]]: second(UNUSED[s[3]])},
        ],
        lambda c, s: _restore(c, s[0]),
    ),
    "save after rollback": Case(
        lambda c, s: save(c, s[2], second(s[2])),
        lambda s: [_firsts(*s[:2]), _firsts(*s[:2]) | {s[2]: second(s[2])}],
        lambda c, s: c.rollback_to(s[1]),
    ),
    "save after delete": Case(
        lambda c, s: save(c, s[3], second(s[3])),
        lambda s: [_firsts(*s[:3]), _firsts(*s[:3]) | {s[3]: second(s[3])}],
        lambda c, s: c.delete(s[3]),
    ),
}


def prepared(root: str, layout: str, case: Case, *, restarted: bool) -> ckpt.Checkpointer:
    """A run right before the call; restarted: by a program that has saved none of its steps."""
    steps = STEPS[layout]
    checkpointer = opened(root, layout)
    for step in steps:
        save(checkpointer, step, first(step))
    if restarted or layout == "persistent only":
        checkpointer.close()
        if layout == "persistent only":
            shutil.rmtree(f"{root}/host")
        checkpointer = opened(root, layout)
        restored = checkpointer.restore_latest(state=tree(0))
        assert restored["state"]["n"] == first(steps[-1])
    case.before(checkpointer, steps)
    return checkpointer


def run(root: str, layout: str, name: str, restarted: bool) -> None:
    import child

    case = CASES[name]
    os.makedirs(root, exist_ok=True)
    checkpointer = prepared(root, layout, case, restarted=restarted)
    with child.armed():
        case.call(checkpointer, STEPS[layout])
    child.report(acknowledged=True)
