"""Which local steps are whole, who fetches what from whom, and who keeps copies of what."""

import errno
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

import ckpt_core as ckpt
from ckpt_core import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ckpt_core._exchange import choose_address, far_route
from ckpt_core._format.part import Part, contains, dump_runs, parse_runs, runs_of
from ckpt_core._run.tiers.judge import (
    ChosenPartner,
    Judgement,
    LocalParts,
    Seen,
    Source,
    State,
    all_partners,
    choose_partner,
    judge,
    judge_copies,
    judge_failure,
    vote,
)
from ckpt_core._run.tiers.save import groups_of


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"process": 0, "of": 2, "serves": [[0, 5]]},
        {"process": 1, "of": 4, "serves": [[1, 2], [0, 0]]},
        {"process": "0", "of": 2, "serves": [[0, 1]]},
        [],
    ],
)
def test_a_note_of_a_part_that_cannot_be(value):
    with pytest.raises((ValueError, KeyError, TypeError)):
        Part.load(value)


def judged(
    everyone: Sequence[list[Seen]],
    machines: list[str] | None = None,
    serving: list[bool] | None = None,
    fetches: bool = True,
) -> Judgement:
    serves = serving or [True] * len(everyone)
    told = [
        LocalParts.parse(LocalParts(parts, fetches, serves[n]).dump())
        for n, parts in enumerate(everyone)
    ]
    found = judge(told, machines or [str(n) for n in range(len(everyone))])
    _every_process_hears(found, len(everyone))
    return found


def _every_process_hears(found: Judgement, count: int) -> None:
    """What each process reads of the answer is what concerns it."""
    rows: list[str] = []

    def publish(told: list[str]) -> str:
        rows[:] = told
        return "name"

    text = found.dump(count, publish)
    for index in range(count):
        here = Judgement.parse(text, index, lambda _, index=index: rows[index])
        assert here.partial == found.partial and list(here.steps) == list(found.steps)
        for step, whole in found.steps.items():
            mine = here.steps[step]
            assert (mine.token, mine.twice) == (whole.token, whole.twice)
            assert mine.sources == {n: some for n, some in whole.sources.items() if n == index}


@st.composite
def _sights(draw: Any) -> tuple[int, list[list[Seen]]]:
    count = draw(st.integers(1, 5))
    groups = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))

    def seen(process: int) -> Any:
        def make(writer: int, token: str, own: bool) -> Seen:
            serves = runs_of(n for n in range(count) if groups[n] == groups[writer])
            return Seen(
                1, token, (0, ord(token)), writer, serves, own and contains(serves, process)
            )

        parts = st.builds(make, st.integers(0, count - 1), st.sampled_from("ab"), st.booleans())
        return st.lists(parts, max_size=3)

    return count, [draw(seen(process)) for process in range(count)]


@given(_sights(), st.data())
def test_whole_means_that_everybody_gets_what_serves_him(sights, data):
    count, everyone = sights
    serving = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    found = judged(everyone, serving=serving)

    def obtainable(process: int, token: str) -> bool:
        near = any(s.token == token and contains(s.serves, process) for s in everyone[process])
        far = any(
            serving[n] and s.token == token and contains(s.serves, process)
            for n, parts in enumerate(everyone)
            for s in parts
        )
        return near or far

    whole = [t for t in "ab" if all(obtainable(process, t) for process in range(count))]
    if not whole:
        assert not found.steps
        return
    step = found.steps[1]
    assert step.token == whole[-1]  # the newer one
    for process in range(count):
        mine = [s for s in everyone[process] if s.token == step.token]
        if any(s.in_place for s in mine):
            assert process not in step.sources
            continue
        assert step.sources[process]
        for source in step.sources[process]:
            given = [s for s in everyone[source.process] if s.writer == source.writer]
            assert any(s.token == step.token and contains(s.serves, process) for s in given)
            assert source.process == process or serving[source.process]


def replicated(process: int, count: int, token: str = "a") -> Seen:
    return Seen(7, token, (0, 1), process, ((0, count - 1),), True)


def test_sources_are_near_and_take_turns():
    everyone = [[replicated(n, 6)] if n < 4 else [] for n in range(6)]
    found = judged(everyone, machines=["x", "x", "y", "y", "y", "z"])
    assert found.steps[7].sources[4][0] == Source(2, 2)  # on the same machine
    assert [len(found.steps[7].sources[n]) for n in (4, 5)] == [3, 3]
    many = judged([[replicated(n, 64)] if n < 8 else [] for n in range(64)]).steps[7]
    assert set(Counter(some[0].process for some in many.sources.values()).values()) == {7}
    alone = judged(everyone, serving=[False] * 6)
    assert not alone.steps and alone.partial == {7: [4, 5]}


def test_which_steps_survive_the_loss_of_a_machine():
    def twice(machines: str, *everyone: list[Seen]) -> bool:
        return judged(everyone, machines=list(machines)).steps[7].twice

    def part(writer: int, own: bool) -> Seen:
        return Seen(7, "a", (0, 1), writer, ((writer, writer),), own)

    own = [[part(n, True)] for n in range(2)]
    copied = [[part(n, True), part(1 - n, False)] for n in range(2)]
    assert twice("xy", *copied) and twice("xx", *copied)
    assert not twice("xy", *own) and not twice("xy", copied[0], own[1])
    everywhere = [[replicated(n, 4)] for n in range(4)]
    assert twice("xxxy", *everywhere)
    other = replicated(9, 4, "b")
    assert not twice("xxxy", *(seen if n < 3 else [other] for n, seen in enumerate(everywhere)))


def test_who_is_read_only_needs_its_own():
    everyone = [[replicated(0, 2)], []]
    assert judged(everyone, fetches=False).partial == {7: [1]}
    assert judged(everyone).steps[7].sources == {1: [Source(0, 0)]}


def test_who_keeps_copies_of_whose_parts():
    def chosen(machines: str, partners: Any = "host") -> list[int | None]:
        told: list[ChosenPartner] = [
            choose_partner(partners, n, len(machines)) for n in range(len(machines))
        ]
        return all_partners(told, machines)

    assert chosen("xxyy") == [2, 3, 0, 1]
    assert chosen("xyxy") == [1, 0, 3, 2]
    assert chosen("xxx") == [1, 2, 0]
    assert chosen("xxy") == [2, 2, 0]
    assert chosen("x") == [None] and chosen("xy", None) == [None, None]
    assert chosen("xyz", lambda index, count: (index + 2) % count) == [2, 0, 1]

    def constant(value: Any) -> Any:
        return lambda index, count: value

    for wrong in (3, -1, 0, True, "1", None):
        with pytest.raises(ValueError, match="must give the index of another"):
            choose_partner(constant(wrong), 0, 3)


def test_all_copy_the_same_steps():
    idle, busy, done = ["idle", -1, ""], ["busy", 4, "t"], ["done", 4, "t"]
    assert judge_copies([idle, idle]) == (True, False)
    assert judge_copies([done, busy]) == (False, False)
    assert judge_copies([done, done]) == (True, True)
    assert judge_copies([done, idle]) == (True, False)


def test_who_holds_the_same():
    assert groups_of("aba", False) == [[0, 2], [1]]
    assert groups_of("aa", True) == [[0, 1]]
    blocks = groups_of("a" * 20 + "b", True)
    assert blocks == [[*range(first, 20, 3)] for first in range(3)] + [[20]]


@given(st.sets(st.integers(0, 99)))
def test_groups_are_sent_as_they_are(indices):
    runs = runs_of(sorted(indices))
    assert parse_runs(dump_runs(runs)) == runs


def test_at_which_address_a_process_serves():
    def address(everyone: list[tuple[str, str | None]], index: int) -> str | None:
        return choose_address(everyone[index][1], far_route(everyone))

    far: list[tuple[str, str | None]] = [("a", "10.0.0.1"), ("b", "10.0.0.2")]
    assert address(far, 0) == "10.0.0.1" and address(far, 1) == "10.0.0.2"
    assert address([("a", "10.0.0.1"), ("a", "10.0.0.1")], 0) == "127.0.0.1"
    assert address([("a", "127.0.0.1"), ("b", None)], 0) is None
    # the coordinator's own host may know itself by loopback only: it takes its way to another one
    assert address([("a", "127.0.0.1"), ("b", "127.0.0.2")], 0) is None
    mixed: list[tuple[str, str | None]] = [("a", "127.0.0.1"), ("a", "127.0.0.1"), *far, far[1]]
    assert far_route(mixed) == "10.0.0.1"


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        ([(CheckpointCorrupt("x"), True), (CheckpointCorrupt("told"), True)], "other"),
        ([(CheckpointNotFound("gone"), False), (CheckpointNotFound("told"), True)], "mend"),
        ([(CheckpointNotFound("no item"), True), (CheckpointNotFound("no item"), True)], "raise"),
        ([(OSError(5, "EIO"), True), (CheckpointError("told"), True)], "unread"),
        ([(OSError(5, "EIO"), True), (CheckpointNotFound("gone"), False)], "mend"),
        ([(OSError(28, "ENOSPC"), True), (OSError(5, "EIO"), True)], "raise"),
        ([(OSError(errno.ENXIO, "gone"), True), (CheckpointError("x"), True)], "unread"),
        ([(OSError(errno.ECONNRESET, "reset"), True)], "unread"),
        ([(OSError("no number"), True)], "other"),
        ([(FileNotFoundError(2, "ENOENT"), True)], "other"),
        ([(IsADirectoryError(21, "EISDIR"), True), (CheckpointError("told"), True)], "other"),
        ([(ckpt.StructureMismatch([]), True), (CheckpointError("told"), True)], "raise"),
        ([(ckpt.StructureMismatch([]), True), (CheckpointCorrupt("x"), True)], "raise"),
        ([(CheckpointError("check_state"), True)] * 2, "raise"),
    ],
)
def test_who_goes_on_to_another_copy(errors, verdict):
    votes = [vote(error, there) for error, there in errors]
    assert judge_failure(votes) == verdict


def test_a_damaged_part_is_mended_first():
    states: list[State] = ["whole", "damaged", "unread"]
    votes = [vote(CheckpointCorrupt("x"), True, lambda found=found: found) for found in states]
    assert votes == ["other", "mend", "unread"] and judge_failure(votes) == "mend"
    assert judge_failure([votes[0], votes[2]]) == "unread"
    assert judge_failure([*votes, "raise"]) == "raise"
