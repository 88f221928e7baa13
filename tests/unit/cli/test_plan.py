"""``ckpt plan``: the interval that loses least time, against a search of all intervals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core._doctor import Tier, best_intervals
from ckpt_core._doctor.interval import interval
from tests.support.command_line import make_call  # noqa: F401 (fixture)

pytest.importorskip("typer")
import typer

from ckpt_core.cli._plan import bytes_of

SECS = {"step_secs": 1.0, "failure_secs": 2000.0, "start_secs": 5.0}
TIERS = st.builds(
    Tier,
    name=st.just("x"),
    blocking_secs=st.floats(0.01, 3),
    write_secs=st.floats(0.1, 20),
    slowdown=st.floats(0, 1),
    restore_secs=st.floats(0.1, 20),
    share=st.floats(0.05, 1),
)


def lost(tier: Tier, steps: int) -> float:
    return interval(tier, steps, *SECS.values()).lost


@given(TIERS)
def test_one_tier(tier: Tier) -> None:
    (found,) = best_intervals(tier, None, **SECS)
    assert found.secs >= tier.write_secs + tier.blocking_secs - 1e-9
    least = min(n for n in range(1, 30) if n >= tier.write_secs + tier.blocking_secs)
    assert found.lost == min(lost(tier, steps) for steps in range(least, 1500))


@given(TIERS, TIERS)
def test_two_tiers_of_which_the_second_takes_every_nth_save(fast: Tier, slow: Tier) -> None:
    both = best_intervals(fast, slow, **SECS)
    assert both[1].steps % both[0].steps == 0
    fits = [tier.write_secs + tier.blocking_secs for tier in (fast, slow)]
    searched = (
        lost(fast, steps) + lost(slow, steps * n)
        for steps, n in itertools.product(range(1, 400, 3), (1, 2, 3, 5, 8, 13, 21, 34, 55))
        if steps >= fits[0] and steps * n >= fits[1]
    )
    assert sum(one.lost for one in both) <= min(searched) * 1.002


def test_young_s_example() -> None:
    """A minute a save, a failure a day: sqrt(2 * 60 * 86400) = 3220 s."""
    tier = Tier("x", blocking_secs=60, write_secs=0, slowdown=0, restore_secs=60)
    (found,) = best_intervals(tier, None, step_secs=1, failure_secs=86_400, start_secs=0)
    assert found.steps in (3219, 3220)
    assert found.saving == pytest.approx(found.redone, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "count"),
    [("5", 5), ("16GB", 16 * 10**9), ("1.5 GiB", 1610612736), ("2e9", 2 * 10**9), ("3k", 3000)],
)
def test_numbers_of_bytes(text: str, count: int) -> None:
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "1e400", "1e308p", "1..2", "1 i", "-1", "nan"])
def test_no_numbers_of_bytes(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no number of bytes"):
        bytes_of(text)


COMMON = ("--state-bytes", "1GiB", "--step-secs", 0.5, "--mtbf", 24, "--mib", 1)


def test_what_is_printed(call, tmp_path: Path) -> None:
    code, out, err = call("plan", tmp_path, *COMMON)
    assert (code, err) == (0, "") and "save_interval_steps=" in out and "useful time" in out
    reported = json.loads(call("plan", tmp_path, *COMMON, "--local", tmp_path / "f", "--json")[1])
    fast, slow = reported["tiers"]
    assert fast["name"] == str(tmp_path / "f") and slow["steps"] % fast["steps"] == 0
    assert 0.5 < reported["useful"] < 1
    assert list(tmp_path.iterdir()) == []


def test_the_line_it_prints_runs(call, tmp_path: Path) -> None:
    import ckpt_core as ckpt

    local = ("--local", tmp_path / "f")
    line = call("plan", tmp_path / "r", *COMMON, *local)[1].strip().splitlines()[-1]
    with eval(line, {"ckpt": ckpt, "Checkpointer": ckpt.Checkpointer}) as checkpointer:
        assert checkpointer.save(0, {"w": 1})


@pytest.mark.parametrize(
    ("option", "value"),
    [("--step-secs", 0), ("--mtbf", "nan"), ("--state-bytes", "16XB"), ("--state-bytes", "0"),
     ("--lost-hosts", 1.5), ("--slowdown", -1), ("--host-rate", "fast"), ("--start-secs", "inf")],
)  # fmt: skip
def test_what_is_no_number(call, tmp_path: Path, option: str, value: object) -> None:
    code, _, err = call("plan", tmp_path, *COMMON, option, value)
    assert code == 2 and "Invalid value" in err


def test_all_options_that_are_missing_are_named_at_once(call) -> None:
    code, _, err = call("plan")
    assert code == 2 and "'--state-bytes', '--step-secs', '--mtbf'" in err
    code, _, err = call("plan", "--step-secs", 1, ".")
    assert code == 2 and "'--state-bytes', '--mtbf'" in err and "--step-secs" not in err
    code, _, err = call("export", "a")
    assert code == 2 and "argument" in err.lower() and "target" in err.lower()


def test_a_place_that_cannot_be_written_to(call) -> None:
    code, _, err = call("plan", "/proc/nothing", *COMMON)
    assert code == 2 and "/proc" in err


def test_names_with_brackets_and_a_rate_of_zero(call, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # a long name and rates of many digits take a second line
    for name in ("x[/b]", "x[red]"):
        code, out, err = call("plan", name, *COMMON)
        assert (code, err) == (0, "") and out.count(name) == 2
    code, _, err = call("plan", tmp_path, *COMMON, "--host-rate", 0)
    assert code == 2 and "--host-rate is 0" in err
