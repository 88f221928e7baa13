"""Programs of fifteen styles, killed twice at random and resumed, end where their straight run ends, bit for bit.

Each is in ``examples/ports``, with the diffs that move it. Where they used Orbax, a run is also begun by Orbax,
continued here, and ended by Orbax.
"""

import functools
import importlib.util
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.programs import Program, two_kills

STEPS = 12


@dataclass(frozen=True)
class Style:
    port: str
    result: str
    needs: tuple[str, ...] = ()
    how: dict[str, Any] = field(default_factory=dict)
    orbax: bool = True
    """Whether its program uses Orbax, itself or through Flax."""
    native_goes_on: bool = True
    """Whether the native form reads what Orbax wrote; not where that is the files of a handler."""


STYLES = [
    Style("maxtext", "state", ("grain",), {"devices": 4, "with_orbax": True}),
    Style("flax_gemma", "state()", ("flax",), {"devices": 4}),
    Style("flax_checkpoints", "state.params, state.opt_state, state.batch_stats", ("flax",)),
    Style("brax", "(params, opt_state, random)", ("flax",)),
    Style("kauldron", "(state, seen, batches.position)", ("flax",), native_goes_on=False),
    Style("nanodo", "state", ("flax", "grain"), {"devices": 4, "with_orbax": True}),
    Style("simply", "state", ("grain",), {"devices": 4}, native_goes_on=False),
    Style("recml", "model.variables"),
    Style("octo", "state", ("flax",), {"with_orbax": True}),
    Style("openpi", "state", ("flax",), {"devices": 2, "processes": 2}),
    Style("tunix", "nnx.state((model, optimizer))", ("flax",), {"devices": 4}),
    Style("purejaxrl", "running", ("flax",), orbax=False),
    Style("big_vision", "(params, opt_state)", (), {"devices": 4}, orbax=False),
    Style("equinox", "(model, opt_state)", ("equinox",), orbax=False),
    Style("torch_save", "(weights, opt_state, env.param.prng)", ("torch", "torchax"), orbax=False),
]
FACE, THERE_AND_BACK = ("face", "face", "face"), ("theirs", "face", "theirs")
NATIVE, ON_FROM_ORBAX = ("native", "native", "native"), ("theirs", "native", "native")


def ways_of(style):
    """In which forms a program is begun, gone on with, and ended."""
    if not style.orbax:
        return [NATIVE]
    return [FACE, THERE_AND_BACK, ON_FROM_ORBAX if style.native_goes_on else NATIVE]


CASES = [(style, forms) for style in STYLES for forms in ways_of(style)]


@functools.cache
def straight_run(place, port, result, how):
    """A program as it is, and what each process ended with; once for all tests."""
    program = Program(port, result, place, **dict(how))
    straight = program.run("theirs", place / "straight")
    assert {tuple(one.steps) for one in straight} == {tuple(range(STEPS))}
    return program, straight


@pytest.fixture(name="place", scope="module")
def make_place(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


def goes_through(program, directory, forms, kills, straight):
    """Runs three forms in one directory, the first two of which are killed: the last ends as the straight run."""
    began: list[int] = []
    trained: list[int] = []  # last: with few calls, a process trains on until it is killed
    ended = straight
    for form, kill in zip(forms, [*kills, None], strict=True):
        ended = program.run(form, directory, kill)
        began.append(ended[0].steps[0])
        trained.append(ended[0].steps[-1])
    what = f"{directory}: {forms}, {kills}: began at {began}, trained {trained}"
    assert began[0] == 0, what
    assert 0 < began[1] <= trained[0] + 1, what
    assert began[1] <= began[2] <= trained[1] + 1, what
    assert [one.digest for one in ended] == [one.digest for one in straight], what


@pytest.mark.parametrize(
    ("style", "forms"), CASES, ids=lambda one: one.port if isinstance(one, Style) else "-".join(one)
)
def test_killed_twice_and_resumed(place, tmp_path, style, forms):
    for name in style.needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    (folder := place / style.port).mkdir(exist_ok=True)
    program, straight = straight_run(folder, style.port, style.result, tuple(style.how.items()))
    kills = two_kills(STEPS, most_calls=4 if "processes" in style.how else 30)
    goes_through(program, tmp_path / "run", forms, kills, straight)


@pytest.mark.parametrize(
    ("local", "forms"), [(False, FACE), (False, ON_FROM_ORBAX), (True, NATIVE)], ids=str
)
def test_two_processes(place, tmp_path, local, forms):
    """The MaxText style with a pipeline for each process; also with a local directory for each."""
    pytest.importorskip("grain")
    (folder := place / f"two{local}").mkdir(exist_ok=True)
    how = {"devices": 2, "processes": 2, "with_orbax": True}
    if local:
        how["more"] = (str(folder / "local"),)
    program, straight = straight_run(folder, "maxtext", "state", tuple(how.items()))
    goes_through(program, tmp_path / "run", forms, two_kills(STEPS, most_calls=4), straight)
