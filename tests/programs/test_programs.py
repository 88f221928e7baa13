"""Programs of eight styles, killed twice at random and resumed, end where their straight run ends, bit for bit.

Each is on a page of ``docs/moving``, with the diffs that move it; here the pages are what is run. Where they used Orbax,
a run is also begun by Orbax, continued here, and ended by Orbax.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.programs import Program, two_kills

pytestmark = pytest.mark.slow

STEPS = 12


@dataclass(frozen=True)
class Style:
    page: str
    result: str
    needs: tuple[str, ...] = ()
    how: dict[str, Any] = field(default_factory=dict)
    native_goes_on: bool = True
    """Whether the native form reads what Orbax wrote; not where that is the files of a handler."""


STYLES = [
    Style("maxtext", "state", ("grain",), {"devices": 4, "with_orbax": True}),
    Style("flax_gemma", "state()", ("flax",), {"devices": 4}),
    Style("flax_checkpoints", "state.params, state.opt_state, state.batch_stats", ("flax",)),
    Style("brax", "(params, opt_state, random)", ("flax",)),
    Style("kauldron", "(state, seen, batches.position)", ("flax",), native_goes_on=False),
    Style("big_vision", "(params, opt_state)", (), {"devices": 4}),
    Style("equinox", "(model, opt_state)", ("equinox",)),
    Style("torch_save", "(weights, opt_state, env.param.prng)", ("torch", "torchax")),
]


@pytest.fixture(name="program", params=STYLES, ids=lambda style: style.page)
def make_program(request, tmp_path):
    style = request.param
    for name in style.needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    return style, Program(style.page, style.result, tmp_path, **style.how)


def goes_through(program, directory, forms, kills, straight):
    """Runs three forms in one directory, the first two of which are killed: the last ends as the straight run."""
    began: list[int] = []
    ended = straight
    for form, kill in zip(forms, [*kills, None], strict=True):
        ended = program.run(form, directory, kill)
        began.append(ended[0].steps[0])
    told = f"{directory}: {forms}, {kills}: began at {began}"
    assert began[0] == 0, told
    assert 0 < began[1] <= kills[0].step + 1, told
    assert began[1] <= began[2] <= kills[1].step + 1, told
    assert [one.digest for one in ended] == [one.digest for one in straight], told


def test_killed_twice_and_resumed(program, tmp_path):
    style, program = program
    straight = program.run("theirs", tmp_path / "straight")
    assert [list(one.steps) for one in straight] == [list(range(STEPS))]
    ways = []
    if program.has_face:
        ways += [("face", "face", "face"), ("theirs", "face", "theirs")]
    crossed = program.has_face and style.native_goes_on
    ways.append(("theirs" if crossed else "native", "native", "native"))
    for number, forms in enumerate(ways):
        goes_through(program, tmp_path / f"run{number}", forms, two_kills(STEPS), straight)


@pytest.mark.parametrize("local", [False, True], ids=["shared", "local"])
def test_two_processes(tmp_path, local):
    """The MaxText style with a pipeline for each process; also with a local directory for each."""
    pytest.importorskip("grain")
    more = [str(tmp_path / "local")] if local else []
    how = {"devices": 2, "processes": 2, "with_orbax": True, "more": more}
    program = Program("maxtext", "state", tmp_path, **how)
    straight = program.run("theirs", tmp_path / "straight")
    assert [list(one.steps) for one in straight] == [list(range(STEPS))] * 2
    native = ("native", "native", "native")
    ways = [native] if local else [("face", "face", "face"), ("theirs", "native", "native")]
    for number, forms in enumerate(ways):
        kills = two_kills(STEPS, most_calls=4)
        goes_through(program, tmp_path / f"run{number}", forms, kills, straight)
