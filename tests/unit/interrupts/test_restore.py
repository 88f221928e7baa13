"""Restores that are interrupted at any moment: afterwards all is old, all is new, or jax refuses it.

An exception that a signal's handler raises may come out of any line. Each test raises one at a line
that is chosen by its number, in our code and in the frameworks' that sets variables, and looks at
what it left behind. The quick form takes a sample, the tests marked ``faults`` and ``slow`` take every line.
"""

from __future__ import annotations

import linecache
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ckpt_core as ckpt
from ckpt_core._load import in_place
from tests.support import keras_models as km

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # between open() and what closes it; Python closes it then
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]

WATCHED = ("ckpt_core", "ckpt_flax_nnx", "ckpt_grain", "ckpt_keras", "ckpt_torchax")
BETWEEN_STEPS = (
    "_threads.py"  # relies on where handlers run: between calls, not between any two lines
)
SETTERS = ("backend/common/variables.py", "nnx/variablelib.py")
LAYERS, WIDTH = 4, 16


class Interrupt(BaseException):
    """What a signal's handler raises."""


class Tracer:
    """Counts the lines that run in the watched files, and raises at one of them.

    Args:
        moment: number of the line to raise at; 0 for none.
    """

    def __init__(self, moment: int = 0) -> None:
        self.count = 0
        self.critical: list[int] = []
        self.moments_of: dict[tuple[str, int], list[int]] = {}
        self._moment = moment
        self._watched: dict[str, bool] = {}

    def __enter__(self) -> Tracer:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if name not in self._watched:
            ours = any(f"/{part}/" in name for part in WATCHED)
            self._watched[name] = name.endswith(SETTERS) or (
                ours and not name.endswith(BETWEEN_STEPS)
            )
        return self._line if self._watched[name] else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        # at the end of a `with` block its line comes again, before the block is left: no handler runs there
        if event == "line" and not _is_with(frame.f_code.co_filename, frame.f_lineno):
            self.count += 1
            code = frame.f_code
            self.moments_of.setdefault((code.co_filename, frame.f_lineno), []).append(self.count)
            if code.co_filename.endswith("in_place.py") and code.co_name != "__init__":
                self.critical.append(self.count)
            if 0 < self._moment <= self.count and not _is_finalizing(frame):
                self._moment = 0
                raise Interrupt(f"at line {self.count}")
        return self._line


def _is_finalizing(frame: FrameType | None) -> bool:
    """Whether Python throws away what is raised here, a handler's exception too."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _is_with(file: str, line: int) -> bool:
    return linecache.getline(file, line).lstrip().startswith("with ")


class Model(nnx.Module):
    def __init__(self, value: float):
        self.layers = nnx.List(
            [nnx.Param(jnp.full((WIDTH, WIDTH), value + i)) for i in range(LAYERS)]
        )
        self.reference = nnx.Variable(jnp.full(3, value), ref=True)
        self.steps = nnx.Variable(int(value))
        self.bare = nnx.data(np.full(2, value))


class Counter:
    """A user's own object, which writes into its memory."""

    def __init__(self, value: float) -> None:
        self.numbers = np.full(4, value)
        self.more = [value, value]

    def get_state(self) -> Any:
        return {"numbers": self.numbers, "more": self.more}

    def set_state(self, state: Any) -> None:
        self.numbers[:2] = state["numbers"][:2]
        self.more[0] = state["more"][0]
        self.numbers[2:] = state["numbers"][2:]
        self.more[1] = state["more"][1]


def iterator(value: float) -> Any:
    made = iter(grain.MapDataset.range(50).to_iter_dataset())
    for _ in range(int(value) // 10):
        next(made)
    return made


def nnx_items(value: float) -> dict[str, Any]:
    model = Model(value)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    state = jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), nnx.state(optimizer))
    nnx.update(optimizer, state)
    return {"model": model, "optimizer": optimizer}


_keras: list[Any] = []


def keras_items(value: float) -> dict[str, Any]:
    if not _keras:  # one for all: to make it takes longer than to restore it
        layers = [km.keras.layers.Dense(WIDTH, use_bias=False) for _ in range(LAYERS)]
        model = km.keras.Sequential([km.keras.Input((WIDTH,)), *layers])
        model.compile(optimizer="adam", loss="mse")
        model.optimizer.build(model.trainable_variables)
        _keras.append(model)
    model = _keras[0]
    for variable in [*model.variables, *model.optimizer.variables, *model.metrics_variables]:
        variable.assign(jnp.full(variable.shape, value, variable.dtype))
    return {"model": model}


def torch_items(value: float) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    made = torch.nn.Linear(4, 4)
    for parameter in made.parameters():
        parameter.data.fill_(value)
    return {"counter": Counter(value), "net": made, "late": Counter(value)}


def mixed_items(value: float) -> dict[str, Any]:
    """The first ones are finished when the last one is set."""
    return {
        "data": iterator(value),
        "counter": Counter(value),
        "first": Model(value),
        "nested": {"one": Model(value), "n": 1, "two": [Counter(value)]},
    }


MAKERS: dict[str, Callable[[float], dict[str, Any]]] = {
    "nnx": nnx_items,
    "keras": keras_items,
    "torch": torch_items,
    "mixed": mixed_items,
}
OLD, NEW = 20.0, 40.0


def numbers(obj: Any) -> Iterator[Any]:
    """Everything that is state, as numbers; raises where jax refuses to give them."""
    adapter: Any = ckpt_adapter(obj)
    if isinstance(obj, dict):
        for value in obj.values():
            yield from numbers(value)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            yield from numbers(value)
    elif isinstance(obj, grain.DatasetIterator):
        yield adapter.get_position(obj)["grain"]
    elif adapter is not None:
        yield from numbers(adapter.get_state(obj))
    else:
        yield np.array(obj).tolist()


def ckpt_adapter(obj: Any) -> Any:
    from ckpt_core import _adapters

    return _adapters.adapter_for(obj)


def found(items: dict[str, Any]) -> list[Any] | None:
    """The whole state; None where jax refuses to use it."""
    try:
        return list(numbers(items))
    except RuntimeError as error:
        if "deleted" not in str(error):
            raise
        return None


def interrupted(
    step: Path, make: Callable[[float], dict[str, Any]], moment: int, options: ckpt.Options
) -> tuple[Tracer, list[Any] | None, BaseException | None]:
    """What a restore leaves of the old state, the tracer, and the exception that came out."""
    items = make(OLD)
    try:
        with Tracer(moment) as tracer:
            ckpt.restore(step, items=items, options=options)
    except Interrupt as error:
        return tracer, found(items), error
    return tracer, found(items), None


def options_of(batches: str) -> ckpt.Options:
    return ckpt.Options(atomic_restore=batches == "atomic")


def sweep(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    batches: str,
    chosen: Callable[[Tracer], list[int]],
) -> None:
    make, options = MAKERS[kind], options_of(batches)
    if batches == "small":
        monkeypatch.setattr(in_place, "_BATCH_BYTES", 2 * WIDTH * WIDTH * 4)
    step = tmp_path / "step"
    ckpt.save(step, items=make(NEW))
    old, new = found(make(OLD)), found(make(NEW))
    assert old != new and old is not None
    interrupted(step, make, 0, options)  # what is done once only is done
    counted, state, error = interrupted(step, make, 0, options)
    assert state == new and error is None
    seen = {"old": 0, "new": 0, "unusable": 0}
    for moment in chosen(counted):
        _, state, error = interrupted(step, make, moment, options)
        if state is None:
            seen["unusable"] += 1
            assert error is not None and "parts of two states" in "".join(error.__notes__)
            assert batches == "small"
            continue
        assert state in (old, new), f"half old, half new after an interrupt at line {moment}"
        assert not getattr(error, "__notes__", []), moment
        seen["old" if state == old else "new"] += 1
    assert seen["old"], seen
    if batches == "small" and kind != "torch":
        assert seen["unusable"], seen


CASES = [
    ("nnx", "small"),
    ("nnx", "large"),
    ("nnx", "atomic"),
    ("keras", "small"),
    ("keras", "large"),
    ("torch", "large"),
    ("mixed", "small"),
    ("mixed", "large"),
]


@pytest.mark.parametrize(("kind", "batches"), CASES)
def test_a_sample_of_all_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, batches: str
) -> None:
    def chosen(counted: Tracer) -> list[int]:
        draw = random.Random(7)
        every = range(counted.critical[0], counted.count + 1)
        few = draw.sample(every, min(len(every), 24))
        return sorted({*few, *draw.sample(counted.critical, min(len(counted.critical), 20))})

    sweep(tmp_path, monkeypatch, kind, batches, chosen)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(("kind", "batches"), CASES)
def test_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, batches: str
) -> None:
    """Every line that runs, the first, the last and some other times that it does.

    With ``CKPT_EVERY_MOMENT=1`` each time, which takes the better part of an hour.
    """

    def chosen(counted: Tracer) -> list[int]:
        first = counted.critical[0]
        if os.environ.get("CKPT_EVERY_MOMENT"):
            return list(range(first, counted.count + 1))
        draw = random.Random(7)
        found: set[int] = set()
        for moments in counted.moments_of.values():
            late = [moment for moment in moments if moment >= first]
            few = [draw.choice(late), late[-1]] if late else []  # what comes before is planning
            found.update([moments[0], *late[:1], *few])
        return sorted(found)

    sweep(tmp_path, monkeypatch, kind, batches, chosen)
