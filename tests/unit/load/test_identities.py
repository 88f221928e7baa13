"""What processes tell each other before they load: bounded in size, and refused where arrays would be woven of two."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import pytest

from ckpt_core import CheckpointError, Options
from ckpt_core._load.agreement import Identity, LoadAgreement, _refuse_different

MANY = 16_384


def told(
    everything: str, beyond: str = "", on: Sequence[tuple[int, int]] = (), attempt: str = "a"
) -> str:
    return json.dumps(["/run/1", attempt, everything, beyond, on])


def refuse_different(texts: Sequence[str]) -> None:
    _refuse_different([Identity(*json.loads(text)) for text in texts])


ALL = [(0, 1)]
STAGES = [told("x", "second", [(1, 1)]), told("x", "first", [(0, 0)])]


@pytest.mark.parametrize(
    "texts",
    [
        [told("x", "x", ALL), told("x", "x", ALL)],
        [told("own of 0", "shared", ALL), told("own of 1", "shared", ALL)],
        [told("own of 0", attempt=""), told("own of 1", attempt="")],
        STAGES,
        [told("x"), told("x", "first", [(0, 0)])],  # only the first process has a stage
        [told("y"), told("x", "x", [(1, 2)]), told("x", "x", [(1, 2)])],  # the first takes no part
    ],
)
def test_these_load_together(texts: list[str]) -> None:
    refuse_different(texts)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([told("x", "x", ALL), told("y", "y", ALL)], "process 1 loads other leaves"),
        ([told("x", "x", ALL), told("y")], "process 1 loads other leaves"),
        ([told("y"), told("x", "x", ALL)], "process 1 loads other leaves"),
        ([told("x", attempt="a"), told("x", attempt="b")], "different checkpoints"),
        ([*STAGES[:1], told("z", "first", [(0, 0)])], "process 1 loads other leaves"),
        ([told("y"), told("x", "x", [(1, 2)]), told("z", "z", [(1, 2)])], "process 2 loads other"),
    ],
)
def test_these_do_not(texts: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        refuse_different(texts)


def test_one_opened_what_the_other_found_moved_aside() -> None:
    """Between two renames the old checkpoint has a hidden name; whoever finds the same two again has two checkpoints."""
    names = ["/run/3", "/run/.ckpt-old.3.2792523a-1-2.4e07408562bedb8b"]
    texts = [json.dumps([name, name, "x", "x", ALL, False, name]) for name in names]
    agreement = LoadAgreement(Options())
    assert "deleted or replaced" in agreement._judged(texts)
    with pytest.raises(CheckpointError, match="different checkpoints"):
        agreement._judged(texts)
    others = [json.dumps([name, name, "x", "x", ALL, False, name]) for name in ("/run/3", "/run/4")]
    with pytest.raises(CheckpointError, match="different checkpoints"):
        LoadAgreement(Options())._judged(others)


def test_many_processes_tell_little_and_are_compared_at_once() -> None:
    """Each stage of a pipeline names all the others: as a list that would be a gigabyte at process 0."""
    texts = [
        told("x", f"{index}", [(0, index - 1)] * (index > 0) + [(index + 1, MANY - 1)])
        for index in range(MANY)
    ]
    assert max(map(len, texts)) < 200
    began = time.process_time()
    refuse_different(texts)
    assert time.process_time() - began < 5
