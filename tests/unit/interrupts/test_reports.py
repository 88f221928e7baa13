"""A handler that raises while a report of slow work begins or ends: no lock stays held, and later work is reported."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from ckpt_core._operation import Operation
from tests.unit.interrupts.test_calls import AtMoment, Stop


def test_a_handler_that_raises_at_any_moment() -> None:
    told: list[Any] = []

    def operation() -> Operation:
        return Operation("save", "x", None, 0.02, told.append)

    with AtMoment() as counted, operation().watched("x"):
        pass
    assert counted.seen > 10
    for moment in range(1, counted.seen + 1):
        with contextlib.suppress(Stop), AtMoment(moment), operation().watched("x"):
            pass
    told.clear()
    with operation().watched("x"):
        end = time.monotonic() + 30
        while not told:
            assert time.monotonic() < end
            time.sleep(0.01)
