"""Which local steps are whole, who fetches what from whom, and who keeps copies of what."""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt_core as ckpt
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ckpt_core._exchange import Key, choose_address, networks_of
from ckpt_core._format.part import Part, contains, progressions, runs_of
from ckpt_core._layout.chunks import chunk_key, chunk_of_key
from ckpt_core._processes import Table
from ckpt_core._run.tiers.judge import (
    ChosenPartner,
    Judgement,
    LocalParts,
    Seen,
    Source,
    all_partners,
    choose_partner,
    inverted,
    judge,
    judge_copies,
    parse_judgement,
)
from ckpt_core._run.tiers.verdict import State, judge_failure, vote
from ckpt_core._save.coverage import (
    MOST_STATE_BYTES,
    Holding,
    group_of,
    serves_of,
    share,
)
from tests.support.counted_service import Keys

INDICES = st.sets(st.integers(0, 40))


@given(INDICES)
def test_runs_hold_their_indices_and_no_other(indices: set[int]):
    runs = runs_of(sorted(indices))
    assert {index for index in range(50) if contains(runs, index)} == indices
    assert all(b[0] > a[1] + 1 for a, b in itertools.pairwise(runs))
    for index in indices:
        part = Part(index, 41, runs)
        assert Part.load(json.loads(json.dumps(part.dump()))) == part


@given(st.text(), st.lists(st.integers(0, 10**6), max_size=4))
def test_the_key_of_a_chunk_tells_array_and_chunk(name: str, index: list[int]):
    key = f"{name}/{chunk_key(tuple(index))}" if name else chunk_key(tuple(index))
    assert chunk_of_key(key) == (name, tuple(index))


def test_what_is_no_key_of_a_chunk():
    for key in ("", "a", "a/c/", "a/c/x", "c/-1", "ac"):
        with pytest.raises(ValueError, match="no key of a chunk"):
            chunk_of_key(key)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"process": 0, "of": 1, "serves": []},
        {"process": 2, "of": 2, "serves": [[0, 2]]},
        {"process": 0, "of": 2, "serves": [[1, 1]]},
        {"process": 0, "of": 2, "serves": [[0, 5]]},
        {"process": 1, "of": 4, "serves": [[1, 2], [0, 0]]},
        {"process": 0, "of": 10**9, "serves": [[0, 0]]},
        {"process": True, "of": 2, "serves": [[0, 1]]},
        {"process": "0", "of": 2, "serves": [[0, 1]]},
        [],
    ],
)
def test_a_note_of_a_part_that_cannot_be(value: Any):
    with pytest.raises((ValueError, KeyError, TypeError)):
        Part.load(value)


def judged(
    everyone: Sequence[list[Seen]],
    machines: list[str] | None = None,
    serving: list[bool] | None = None,
    mends: bool = True,
) -> Judgement:
    told = [
        LocalParts.parse(LocalParts(parts, mends).dump(index), index)
        for index, parts in enumerate(everyone)
    ]
    names = machines or [str(n) for n in range(len(everyone))]
    found = judge(told, names, serving or [True] * len(everyone))
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
        here = parse_judgement(text, index, lambda _, number: rows[number])
        assert here.partial == found.partial and list(here.steps) == list(found.steps)
        for step, whole in found.steps.items():
            mine = here.steps[step]
            assert (mine.token, mine.twice) == (whole.token, whole.twice)
            assert list(mine.sources) == whole.sources.get(index, [])
            assert [mine.piece(n) for n in range(mine.pieces)] == whole.pieces


TOKENS = st.dictionaries(st.integers(0, 5), st.sampled_from("ab"), max_size=4)


@given(st.lists(TOKENS, min_size=1, max_size=4))
def test_of_no_use_for_others_a_step_is_whole_if_all_have_it(everyone: list[dict[int, str]]):
    parts = [
        [Seen(step, token, (0, 0, 0.0), n, ((n, n),), True) for step, token in mine.items()]
        for n, mine in enumerate(everyone)
    ]
    found = judged(parts)
    for step in range(6):
        tokens = {mine.get(step) for mine in everyone}
        assert (step in found.steps) == (len(tokens) == 1 and tokens != {None})
        assert (step in found.partial) == (len(tokens) > 1)
        if step in found.steps:
            assert {found.steps[step].token} == tokens and not found.steps[step].sources


@st.composite
def _sights(draw: Any) -> tuple[int, list[list[Seen]]]:
    count = draw(st.integers(1, 5))
    groups = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))

    def seen(process: int) -> Any:
        def make(writer: int, token: str, own: bool) -> Seen:
            serves = runs_of(n for n in range(count) if groups[n] == groups[writer])
            return Seen(
                1, token, (0, ord(token), 0.0), writer, serves, own and contains(serves, process)
            )

        parts = st.builds(make, st.integers(0, count - 1), st.sampled_from("ab"), st.booleans())
        return st.lists(parts, max_size=3)

    return count, [draw(seen(process)) for process in range(count)]


@given(_sights(), st.data())
def test_whole_means_that_everybody_gets_what_serves_him(
    sights: tuple[int, list[list[Seen]]], data: st.DataObject
):
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
        if any(s.own for s in mine):
            assert process not in step.sources
            continue
        assert step.sources[process]
        for place, source in enumerate(step.sources[process]):
            given = [s for s in everyone[source.process] if s.writer == source.writer]
            if place == 0 and source.process in step.sources:  # which gets it before
                assert source.writer == source.process or given
                continue
            assert any(s.token == step.token and contains(s.serves, process) for s in given)
            assert source.process == process or serving[source.process]


def replicated(process: int, count: int, token: str = "a") -> Seen:
    return Seen(7, token, (0, 1, 0.0), process, ((0, count - 1),), True)


def test_sources_are_near_and_take_turns():
    everyone = [[replicated(n, 6)] if n < 4 else [] for n in range(6)]
    found = judged(everyone, machines=["x", "x", "y", "y", "y", "z"])
    assert found.steps[7].sources[4][0] == Source(2, 2)  # on the same machine
    assert found.steps[7].sources[5][0] == Source(0, 0)  # process 2 is asked already
    assert len(found.steps[7].sources[4]) == 3
    alone = judged(everyone, serving=[False] * 6)
    assert not alone.steps and alone.partial == {7: [4, 5]}


def test_a_part_beside_its_own_is_not_the_only_source():
    """It may be damaged as well, and the other machine's whole."""
    beside = replicated(0, 4)._replace(own=False)
    everyone = [[replicated(0, 4)], [beside], [replicated(2, 4)], [replicated(3, 4)]]
    found = judged(everyone, machines=["x", "x", "y", "y"])
    assert found.steps[7].sources == {1: [Source(1, 0), Source(0, 0), Source(2, 2)]}


def test_which_steps_survive_the_loss_of_a_machine():
    def twice(machines: str, *everyone: list[Seen]) -> bool:
        return judged(everyone, machines=list(machines)).steps[7].twice

    def part(writer: int, own: bool) -> Seen:
        return Seen(7, "a", (0, 1, 0.0), writer, ((writer, writer),), own)

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
    assert judged(everyone, mends=False).partial == {7: [1]}
    assert judged(everyone).steps[7].sources == {1: [Source(0, 0)]}


def of_three(writer: int, *, differ_in_shards_alone: bool = True, serves: Any = None) -> Seen:
    return Seen(
        7, "a", (0, 1, 0.0), writer, serves or ((writer, writer),), False, 3, differ_in_shards_alone
    )


def test_a_step_of_another_number_is_whole_if_every_part_is_held():
    whole = judged([[of_three(0), of_three(2)], [of_three(1)]])
    assert whole.steps[7].pieces == [[Source(0, 0)], [Source(1, 1)], [Source(0, 2)]]
    assert not whole.steps[7].sources and not whole.steps[7].twice
    assert judged([[of_three(0)], [of_three(2)]]).partial == {7: [1]}
    served = [[of_three(1, serves=((0, 0), (2, 2)))], [of_three(1)]]
    assert judged(served).steps[7].pieces == [[Source(0, 1)], [Source(1, 1)]]
    # one that is read-only gets nothing; values that differ are nobody else's; who serves nobody
    everyone = [[of_three(0), of_three(2)], [of_three(1)]]
    assert not judged(everyone, mends=False).steps
    assert not judged(
        [[of_three(0), of_three(2)], [of_three(1, differ_in_shards_alone=False)]]
    ).steps
    assert judged(everyone, serving=[True, False]).partial == {7: [1]}
    # a process alone serves nobody, and needs all beside it
    alone = [[of_three(0), of_three(1), of_three(2)]]
    assert len(judged(alone, serving=[False]).steps[7].pieces) == 3


def test_the_newer_save_counts_of_whichever_number_it_is():
    own = [Seen(7, "b", (0, 2, 0.0), n, ((n, n),), True) for n in range(2)]
    both = [[own[0], of_three(0), of_three(2)], [own[1], of_three(1)]]
    assert judged(both).steps[7].token == "b" and not judged(both).steps[7].pieces
    older = [
        [seen._replace(order=(0, 0, 0.5)) if seen.own else seen for seen in some] for some in both
    ]
    assert judged(older).steps[7].token == "a" and len(judged(older).steps[7].pieces) == 3


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


@given(st.lists(st.sampled_from("xyz"), min_size=2, max_size=12))
def test_partners_are_elsewhere_where_that_is_possible(machines: list[str]):
    told: list[ChosenPartner] = ["host"] * len(machines)
    partners = all_partners(told, machines)
    assert sum(map(len, inverted(partners))) == len(machines)
    for index, machine in enumerate(machines):
        partner = partners[index]
        assert partner is not None and partner != index
        assert machines[partner] != machine or len(set(machines)) == 1
        assert index in inverted(partners)[partner]


def test_all_copy_the_same_steps():
    idle, busy, done = ["idle", -1, ""], ["busy", 4, "t"], ["done", 4, "t"]
    assert judge_copies([idle, idle]) == {"copies": True, "protected": None}
    assert judge_copies([done, busy]) == {"copies": False, "protected": None}
    assert judge_copies([done, done]) == {"copies": True, "protected": [4, "t"]}
    assert judge_copies([done, idle]) == {"copies": True, "protected": None}
    assert judge_copies([["off", -1, ""]] * 2) == {"copies": False, "protected": None}


def test_who_holds_the_same():
    def groups(*told: Holding) -> tuple[list[int], dict[str, Any]]:
        shares = share(told)
        return shares.groups, shares.states

    assert groups(Holding("a", {}), Holding("b", {}), Holding("a", {})) == ([0, 1, 0], {})
    states = [{"data": {f"{n}.json": "x" * n}} for n in range(2)]
    together = {"data": {"0.json": "", "1.json": "x"}}
    assert groups(*[Holding("a", one) for one in states]) == ([0, 0], together)
    # states that are too large stay with their process, so that nobody can stand in for it
    assert groups(Holding("a", states[0]), Holding("a", None)) == ([0, 1], {})
    large = [{"data": {f"{n}": "x" * MOST_STATE_BYTES}} for n in range(9)]
    assert groups(*[Holding("a", one) for one in large]) == (list(range(9)), {})


def test_many_processes_get_the_states_of_their_block():
    """With 256 all get all; with more each gets those of 8 that hold the same, and its part is of use for those."""

    def told(count: int, size: int = 250) -> Any:
        return share([Holding("a", {"data": {f"{n}.json": "x" * size}}, "v") for n in range(count)])

    few = told(256)
    assert few.groups == [0] * 256 and len(few.states["data"]) == 256 and not few.blocks
    many = told(1001)
    assert many.groups == [n % 126 for n in range(1001)] and not many.states
    assert [len(block["data"]) for block in many.blocks] == [8] * 119 + [7] * 7
    # spread over the job: neighbours, which may be on one host, are in other blocks
    assert list(many.blocks[1]["data"])[:3] == ["1.json", "127.json", "253.json"]
    assert not many.differ_in_shards_alone
    assert told(300, 60_000).groups == list(range(300))  # a block of them is too much


@pytest.mark.parametrize("copies", [1, 2, 5, pytest.param(64, marks=pytest.mark.slow)])
def test_replicas_of_a_sharded_model_are_of_use_for_each_other(copies: int):
    """FSDP within 64 processes, replicated: who holds a shard is 64 processes away, and takes the place of a lost one."""
    count = 64 * copies * 8
    held = [
        Holding(str(n % (64 * 8)), {"data": {f"{n}.json": "x" * 250}}, f"v{n}")
        for n in range(count)
    ]
    found = share(held)
    rows = found.rows()
    for n in range(0, count, 97):
        serves = serves_of(n, rows.__getitem__)
        block = [m for m in range(count) if contains(serves, m)]
        assert n in block
        assert len(block) == min(copies, 8)
        assert {m % (64 * 8) for m in block} == {n % (64 * 8)}
        states = found.blocks[group_of(n, count, rows.__getitem__)]
        expected = {f"{m}.json" for m in block} if copies > 1 else set[str]()
        assert set(states.get("data", {})) == expected


def test_who_differs_in_regions_alone():
    def alike(*told: Holding) -> bool:
        return share(told).differ_in_shards_alone

    assert alike(Holding("a", {}, "v"), Holding("b", {}, "v"))
    assert not alike(Holding("a", {}, "v"), Holding("b", {}, "w"))
    # the states of all are in each part, unless they are too large
    states = [{"data": {f"{n}.json": "x" * n}} for n in range(2)]
    assert alike(*[Holding("a", one, "v") for one in states])
    assert not alike(Holding("a", states[0], "v"), Holding("a", None, "v"))
    part = Part(1, 2, ((1, 1),), differ_in_shards_alone=True)
    assert Part.load(json.loads(json.dumps(part.dump()))).differ_in_shards_alone
    assert not Part.load({"process": 0, "of": 2, "serves": [[0, 0]]}).differ_in_shards_alone
    assert Part.own(0, 1).differ_in_shards_alone and not Part.own(0, 2).differ_in_shards_alone


def test_at_which_address_a_process_serves():
    def address(everyone: list[tuple[str, str | None]], index: int) -> str | None:
        return choose_address(*everyone[index], networks_of(everyone))

    far: list[tuple[str, str | None]] = [("a", "10.0.0.1"), ("b", "10.0.0.2")]
    assert address(far, 0) == "10.0.0.1" and address(far, 1) == "10.0.0.2"
    assert address([("a", "10.0.0.1"), ("a", "10.0.0.1")], 0) == "127.0.0.1"
    assert address([("a", "127.0.0.1"), ("b", None)], 0) is None
    # the coordinator's own host may know itself by loopback only: it takes its way to another one
    assert address([("a", "127.0.0.1"), ("b", "127.0.0.2")], 0) is None
    mixed: list[tuple[str, str | None]] = [("a", "127.0.0.1"), ("a", "127.0.0.1"), *far, far[1]]
    assert networks_of(mixed).elsewhere == (("a", "10.0.0.1"), ("b", "10.0.0.2"))


@given(st.lists(st.text("ab,[", max_size=300), min_size=1, max_size=70))
def test_each_process_reads_its_row_of_a_table(rows: list[str]):
    keys = Keys()
    first, other = Table(keys, "t"), Table(keys, "t")
    name = first.publish(rows)
    assert (name == "") == (not any(rows))
    for table in (first, other):
        for number, row in enumerate(rows):
            assert table.row(name, number) == row
    blocks = len(keys.values)
    assert keys.gets == blocks and first.publish(rows) == name and len(keys.values) == blocks


def test_a_table_takes_the_place_of_the_one_before():
    keys = Keys()
    first, other = Table(keys, "t"), Table(keys, "t")
    old = first.publish(["a", "b"])
    new = first.publish(["a", "c"])
    assert other.row(new, 1) == "c" and other.row("", 1) == ""
    with pytest.raises(CheckpointError, match="gone from the coordination service"):
        Table(keys, "t").row(old, 1)


@given(INDICES)
def test_progressions_hold_their_indices_and_no_other(indices: set[int]):
    found = [one for steps in progressions(sorted(indices)) for one in range(*steps)]
    assert found == sorted(indices)


@pytest.mark.parametrize("groups", [1, 128, 4096])
def test_what_4096_processes_read_of_who_holds_the_same(groups: int):
    """A mesh of 4,096 processes: each reads a few hundred bytes once, and nothing at the saves that follow."""
    told = [Holding(f"{n % groups}", {}, "v") for n in range(4096)]
    keys = Keys()
    first = Table(keys, "t")
    name = first.publish(share(told).rows())
    for index in (0, 1, 2047, 4095):
        table = first if index == 0 else Table(keys, "t")
        serves = serves_of(index, lambda number, table=table: table.row(name, number))
        assert serves == runs_of(range(index % groups, 4096, groups))
    assert keys.sent_bytes <= 3 * 2 * 2048
    assert sum(map(len, keys.values.values())) < 200 * 1024
    before = keys.gets
    assert first.publish(share(told).rows()) == name and keys.gets == before


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        ([(CheckpointCorrupt("x"), True), (CheckpointCorrupt("told"), True)], "leave"),
        ([(CheckpointNotFound("gone"), False), (CheckpointNotFound("told"), True)], "mend"),
        ([(CheckpointNotFound("no item"), True), (CheckpointNotFound("no item"), True)], "raise"),
        ([(OSError(5, "EIO"), True), (CheckpointError("told"), True)], "unread"),
        ([(OSError(5, "EIO"), True), (CheckpointNotFound("gone"), False)], "mend"),
        ([(OSError(28, "ENOSPC"), True), (OSError(5, "EIO"), True)], "raise"),
        ([(OSError(errno.ENXIO, "gone"), True), (CheckpointError("x"), True)], "unread"),
        ([(OSError(errno.ECONNRESET, "reset"), True)], "unread"),
        ([(OSError("no number"), True)], "leave"),
        ([(FileNotFoundError(2, "ENOENT"), True)], "leave"),
        ([(IsADirectoryError(21, "EISDIR"), True), (CheckpointError("told"), True)], "leave"),
        ([(ckpt.StructureMismatch([]), True), (CheckpointError("told"), True)], "raise"),
        ([(ckpt.StructureMismatch([]), True), (CheckpointCorrupt("x"), True)], "raise"),
        ([(CheckpointError("check_state"), True)] * 2, "raise"),
    ],
)
def test_who_goes_on_to_another_copy(errors: list[tuple[Exception, bool]], verdict: str):
    votes = [vote(error, there) for error, there in errors]
    assert judge_failure(votes) == verdict


def test_a_damaged_part_is_mended_first():
    states: list[State] = ["whole", "damaged", "unread"]
    votes = [vote(CheckpointCorrupt("x"), True, lambda found=found: found) for found in states]
    assert votes == ["leave", "mend", "unread"] and judge_failure(votes) == "mend"
    assert judge_failure([votes[0], votes[2]]) == "unread"
    assert judge_failure([*votes, "raise"]) == "raise"


def test_what_options_refuse():
    with pytest.raises(ValueError, match=r"partners must be None, 'host'"):
        ckpt.Options(partners="rack")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="partner_bytes_per_sec"):
        ckpt.Options(partner_bytes_per_sec=0)
    assert Key(1, "a", 0) == (1, "a", 0)
