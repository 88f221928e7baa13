"""Hosts that are lost, damaged and change places at random: no step is lost as long as somebody has each part."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.launch import launch, reports
from tests.unit.processes.test_lost_hosts import COMMON
from tests.unit.processes.test_other_numbers import ROWS

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


# One directory for all, in which every process has a folder; copies are in that of the next one.
OTHER_NUMBER = """
by = P("data")
own = Path(f"{directory}/local")

def folder(of):
    (found,) = own.glob(f"run-*/process_{of}-of-{count}")
    return found

def damage(of):
    file = max(folder(of).glob("[0-9]*/*/ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

told["found"] = restored(by, local=own)
with start(by, local=own) as checkpointer:
    found = resume(checkpointer, by)
    settle(checkpointer)
    if GOES_ON:
        checkpointer.save(LAST, state(LAST, by))
        checkpointer.wait_until_finished()
        settle(checkpointer)
if FIRST:
    on(0, destroy_persistent)
if GOES_ON and TROUBLED < count:
    on(0, lambda: damage(TROUBLED) if DAMAGED else shutil.rmtree(folder(TROUBLED)))
report(**told)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_numbers_of_processes_at_random(tmp_path: Path, seed: int) -> None:
    """Each round has another number, and one that lost its folder or a byte; some save nothing."""
    chance = random.Random(seed)
    saved: int | None = None
    for number in range(7):
        goes_on = number == 0 or chance.random() < 0.8
        drawn = {
            "GOES_ON": goes_on,
            "LAST": number,
            "FIRST": number == 0,
            "TROUBLED": chance.randrange(4),
            "DAMAGED": chance.random() < 0.5,
        }
        code = ROWS + OTHER_NUMBER
        for name, value in drawn.items():
            code = code.replace(name, str(value))
        processes = chance.choice([2, 3, 4])
        for told in reports(launch(code, tmp_path / "run", processes=processes, devices=1)):
            wanted = None if saved is None else [saved, "local"]
            assert told["found"] == wanted, (number, drawn, processes)
        saved = number if goes_on else saved
