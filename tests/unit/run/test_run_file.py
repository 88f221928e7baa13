"""Which saves of a run count: a lineage bounds those before it; and the file ``.ckpt-run``."""

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

import ckpt_core as ckpt
from ckpt_core._run.run_file import Removal, RunFile, parse_run_file

NAME = f"run-{'0' * 16}"


def token_of(lineage: str, count: int) -> str:
    """The token of the ``count``-th save of a lineage."""
    return f"{lineage}{count:016x}"


def lineage(number: int) -> str:
    return f"{number:016x}"


def grown(bounds: Iterable[int]) -> RunFile:
    run = RunFile(NAME, lineage(0))
    for number, bound in enumerate(bounds, 1):
        run = run.branch(lineage(number), bound)
    return run


def test_a_step_that_was_left_never_counts_again_and_no_other_is_lost() -> None:
    """Every way of branching four times over the steps -1 to 3."""
    for bounds in itertools.product(range(-1, 4), repeat=4):
        for length in range(5):
            run = grown(bounds[:length])
            for born in range(length + 1):
                left_at = min(bounds[born:length], default=99)
                for step in range(5):
                    order = run.order(step, token_of(lineage(born), 1))
                    assert (order is not None) == (step <= left_at), (bounds, length, born, step)


def test_of_one_number_the_newest_save_counts() -> None:
    run = grown([3, 3])
    saves = [token_of(lineage(born), count) for born in range(3) for count in (1, 2, 16)]
    for (i, one), (j, other) in itertools.product(enumerate(saves), repeat=2):
        assert run.newer(2, one, other) == (i > j)
    assert run.newer(2, saves[0], "of another run") and not run.newer(2, "of another run", saves[0])
    assert not run.newer(4, saves[0], saves[-1])  # it does not count


@given(st.lists(st.integers(-1, 9), max_size=5), st.integers(0, 9), st.integers(0, 5))
def test_a_run_goes_through_its_file(bounds: list[int], step: int, born: int) -> None:
    run = grown(bounds)
    token = token_of(lineage(born), 3)
    for changed in (
        RunFile(),
        RunFile(removals=(Removal(f"{step}", step, token, None),)),
        run,
        run.without(step),
        run.overwritten(step, token),
        run.without(1).overwritten(2, token),
        replace(run, removals=(Removal("a_7", 7, "", "retired"), Removal("5", 5, token, None))),
    ):
        assert parse_run_file(changed.dump(), "/run") == changed


@given(st.binary(max_size=80))
def test_what_is_no_run_file_is_told(data: bytes) -> None:
    """A damaged one may be read as another one, but never as a name that ckpt does not give."""
    for text in (data, b"{" + data, b'{"name": "' + data, grown([1]).dump() + data):
        try:
            run = parse_run_file(text, "/run")
        except ckpt.CheckpointCorrupt as error:
            assert "/run/.ckpt-run is damaged" in str(error)  # noqa: PT017
        else:
            assert parse_run_file(run.dump(), "/run") == run


@pytest.mark.parametrize("name", ["../../thesis", "/thesis", "..", ".git", "", "a\\b", 7])
@pytest.mark.parametrize("into", [True, False])
def test_a_crafted_one_names_nothing_outside_of_its_directory(name, into):
    """Who got a run from somebody, and saves one step, lost the directory that it named."""
    removal = ["3", 3, "", name] if into else [name, 3, "", None]
    with pytest.raises(ckpt.CheckpointCorrupt, match="no name of a directory beside it"):
        parse_run_file(json.dumps({"removals": [removal]}).encode(), "/run")


def test_that_of_version_0_1_0_names_no_run() -> None:
    """Its local steps count no more; its persistent ones do."""
    text = f"{NAME}\n{lineage(0)}\n[]\n".encode()
    assert parse_run_file(text, "/run") == RunFile()
