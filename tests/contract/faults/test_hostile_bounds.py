"""Every hostile case reaches the bound that it is made for, and does harm without the bounds it meets.

The bounds that a case meets are the `raise` statements of `ckpt_core` behind the errors of its
readers. They are taken out of ckpt, in a child, and the case is opened again; what it meets then is
taken out as well, until it does harm: it ends the process, hangs, takes more memory than it may,
is loaded by who refused it, or raises what is no `CheckpointError`. A case that is still refused when ckpt has nothing
left to refuse it with was never held by a bound of ckpt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.faults.crafted import CASES
from tests.contract.faults.crafted.case import Case
from tests.contract.faults.fixtures import make_plain_pool  # noqa: F401 (fixture)
from tests.contract.faults.harness import Nursery, Pool
from tests.contract.faults.test_hostile import (
    ADDRESS_SPACE_BYTES,
    LOADERS,
    judge,
    make_case,
    make_good,  # noqa: F401 (fixture)
    make_outside,
    refused_by,
)

_TIMEOUT_SECS = 20  # a case takes some milliseconds: what takes longer hangs
_FIRST_TIMEOUT_SECS = 90
_ROUNDS = 12

SOME = (
    "record-shape-huge",
    "record-item-deep-nodes",
    "checksums-block-bytes-one",
    "database-blosc-bomb-blosc",
    "database-terabyte-chunk-zstd",
    "index-node-of-40-gigabytes",
    "orbax-chunk-2-45",
    "orbax-json-deep",
)
"""Of each kind of bound one."""


def test_some_cases_do_harm_without_their_bounds(
    plain_pool: Pool, good: Path, tmp_path: Path
) -> None:
    _check(plain_pool, good, tmp_path, [case for case in CASES if case.name in SOME])


@pytest.mark.parametrize("part", range(5))
def test_every_case_does_harm_without_its_bounds(
    plain_pool: Pool, good: Path, tmp_path: Path, part: int
) -> None:
    refused = [case for case in CASES if case.says is not None]
    _check(plain_pool, good, tmp_path, refused[part::5])


def _check(pool: Pool, good: Path, tmp_path: Path, cases: list[Case]) -> None:
    make_outside(tmp_path)

    def job(nursery: Nursery, numbered: tuple[int, Case]) -> str | None:
        number, case = numbered
        return _harmless(nursery, case, str(make_case(case, good, tmp_path, number)))

    found = [text for text in pool.map(job, enumerate(cases)) if text is not None]
    assert not found, f"{len(found)} of {len(cases)}:\n" + "\n".join(found)


def _harmless(nursery: Nursery, case: Case, path: str) -> str | None:
    """What is wrong with a case: it is refused whatever is taken out; None where it does harm."""
    taken: list[list[Any]] = []
    refused: list[str] = []
    event: dict[str, Any] = {}
    for _ in range(_ROUNDS):
        outcome = nursery.run(
            "mutant:open_without",
            [taken, [(case.name, path)]],
            timeout_secs=_TIMEOUT_SECS if taken else _FIRST_TIMEOUT_SECS,
            limits={"RLIMIT_AS": ADDRESS_SPACE_BYTES},
        )
        events = [event for event in outcome.events if "opened" in event]
        if outcome.exit_code != 0 or not events:
            assert taken, f"{case.name}: {outcome}"
            assert "no raise in" not in str(outcome), f"{case.name}: {outcome}"
            return None
        (event,) = events
        if not taken and not refused_by(case, event):
            return f"{case.name}: is not refused with {case.says!r}: {event['results']}"
        loads = [reader for reader in LOADERS if event["results"][reader] in ("ok", "good")]
        if not taken:
            refused = [reader for reader in LOADERS if reader not in loads]
        if any(judge(case, event)) or any(reader in refused for reader in loads):
            return None if taken else f"{case.name}: does harm as it is: {event['results']}"
        more = [bound for bound in event["raised"] if bound not in taken]
        if not more:
            return f"{case.name}: is refused by nothing of ckpt's: {event['results']}"
        taken += [bound for n, bound in enumerate(more) if bound not in more[:n]]
    return f"{case.name}: is still refused without {taken}: {event['results']}"
