"""Hosts that are lost, damaged and change places at random: no step is lost as long as somebody has each part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.test_lost_hosts import COMMON
from tests.support.launch import launch, reports

# All processes draw the same numbers.
ROUNDS = (
    COMMON
    + """
import random
chance = random.Random(SEED)
by = P("data") if chance.random() < 0.7 else P()
last, shift, told["rounds"] = 2, 0, []

def here():
    return Path(f"{directory}/local/{(index + shift) % count}")

for number in range(ROUND_COUNT):
    own = here()
    train(last, by, local=own)
    if number == 0:
        on(0, destroy_persistent)
    first = chance.randrange(count)
    # no two neighbours: one of them has the only copy of the other's part
    troubled = [first, (first + 2) % count][: chance.randint(1, 2) if count > 3 else 1]
    lost = [process for process in troubled if chance.random() < 0.6]
    for process in troubled:
        on(process, lose if process in lost else lambda: damage(last))
    if chance.random() < 0.3:
        shift = chance.randrange(count)
    own = here()
    found = restored(by, local=own)
    assert found == [last, "local"], (number, found, last, troubled, lost, shift)
    told["rounds"].append([last, troubled, lost, shift])
    last += chance.randint(1, 2)
report(**told)
"""
)


def check(tmp_path: Path, seed: int, processes: int, rounds: int) -> None:
    code = ROUNDS.replace("SEED", str(seed)).replace("ROUND_COUNT", str(rounds))
    ended = launch(code, tmp_path / "run", processes=processes, devices=1, limit_secs=30 * rounds)
    assert {len(told["rounds"]) for told in reports(ended)} == {rounds}


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "processes"), [(0, 2), (1, 4), (2, 4), (3, 8)])
def test_some_rounds(tmp_path: Path, seed: int, processes: int) -> None:
    check(tmp_path, seed, processes, 4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_rounds(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed, 4, 10)
