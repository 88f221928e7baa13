"""No load ever gives other bits than were saved: a damaged checkpoint is refused, and says where.

One checkpoint with a leaf of every kind is damaged in many ways, one at a time. A load must raise a
`CheckpointError` that names the file or the leaf, or give exactly what was saved (where it does not
need what was damaged); `verify` must find every change. Loads run in children with a time limit, so
a crash or a hang is a failure and not the end of the test run.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.contract.faults.harness import Children

Change = list[Any]
_BATCH = 120
_BATCH_TIMEOUT_SECS = 120


@pytest.fixture(scope="module")
def saved(plain_pool: Children, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint `good`, and `stale`: the same tree with older values."""
    root = tmp_path_factory.mktemp("saved")
    for version, name in enumerate(("stale", "good")):
        outcome = plain_pool.run("damage:make", [str(root / name), version])
        assert outcome.exit_code == 0, str(outcome)
        assert outcome.reported("verified") == [True], str(outcome)
    return root


def test_undamaged_copy_loads(plain_pool, saved, tmp_path):
    """The copies themselves are fine: what the other tests find is the damage."""
    arguments = [str(saved / "good"), str(tmp_path / "copy"), 1, _files(saved / "good")[0]]
    outcome = plain_pool.run("damage:load_untouched", arguments)
    assert outcome.exit_code == 0, str(outcome)
    assert outcome.reported("outcome") == ["same"], str(outcome)
    assert outcome.reported("verified") == [True], str(outcome)


def _swaps(
    saved: Path, pairs: Callable[[list[str]], Iterable[tuple[str, str]]]
) -> Iterator[Change]:
    return (["swap", a, b] for a, b in pairs(_files(saved / "good")))


def _lengths(directory: Path) -> Iterator[Change]:
    for name in _files(directory):
        size = (directory / name).stat().st_size
        yield from (["cut", name, length] for length in range(0, size, max(1, size // 150)))


CHANGES: dict[str, Callable[[Path], Iterable[Change]]] = {
    "flipped bits": lambda saved: _flips(saved / "good", per_file=14),
    "truncated, grown, zeroed and missing": lambda saved: _sizes(saved / "good"),
    "swapped and stale": lambda saved: [*_swaps(saved, itertools.pairwise), *_stale(saved)],
    "every byte of metadata and every 64th of data": lambda saved: _flips(saved / "good", None),
    "every pair swapped": lambda saved: _swaps(saved, partial(itertools.combinations, r=2)),
    "truncated at many lengths": lambda saved: _lengths(saved / "good"),
}


@pytest.mark.parametrize(
    "name", [pytest.param("flipped bits", marks=pytest.mark.always), *[*CHANGES][1:]]
)
def test_damaged_files(plain_pool, saved, tmp_path, name):
    _check(plain_pool, saved, tmp_path, [*CHANGES[name](saved)])


def _files(directory: Path) -> list[str]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(directory)) for path in paths)


def _flips(directory: Path, per_file: int | None) -> Iterator[Change]:
    """Flipped bits, spread evenly: so many of each file, first and last byte included; None: every byte, of data files every 64th."""
    for name in _files(directory):
        size = (directory / name).stat().st_size
        if not size:
            continue
        every = 64 if Path(name).parent.name == "d" else 1
        step = max(1, (size - 1) // per_file) if per_file else every
        for byte in sorted({*range(0, size, step), size - 1}):
            yield ["flip", name, byte, byte * 5 % 8]


def _sizes(directory: Path) -> Iterator[Change]:
    for name in _files(directory):
        size = (directory / name).stat().st_size
        yield ["delete", name]
        yield ["grow", name]
        if size:
            yield ["cut", name, 0]
            yield ["zero", name]
            yield ["zero_range", name, size // 3, size // 2]
            yield ["zero_range", name, size - 1, size]
            for length in sorted({1, size // 2, size - 1} - {0, size}):
                yield ["cut", name, length]


def _stale(saved: Path) -> Iterator[Change]:
    """Every file and every item taken from the older checkpoint, which is valid in itself."""
    good, stale = saved / "good", saved / "stale"
    for name in _files(good):
        yield ["replace", name, str(_counterpart(good, stale, name))]
    for item in sorted(path.name for path in good.iterdir() if path.is_dir()):
        yield ["replace_item", item, str(stale / item)]


def _counterpart(good: Path, stale: Path, name: str) -> Path:
    """The file of the same role: data files have random names, so those go by size."""
    if (stale / name).exists():
        return stale / name

    def by_size(directory: Path) -> list[Path]:
        return sorted((directory / name).parent.iterdir(), key=lambda path: path.stat().st_size)

    return by_size(stale)[by_size(good).index(good / name)]


def _check(pool: Children, saved: Path, scratch: Path, changes: list[Change]) -> None:
    good = saved / "good"
    batches = [changes[i : i + _BATCH] for i in range(0, len(changes), _BATCH)]

    def job(numbered: tuple[int, list[Change]]) -> list[str]:
        number, batch = numbered
        outcome = pool.run(
            "damage:load_damaged",
            [str(good), str(scratch / str(number)), 1, batch],
            timeout_secs=_BATCH_TIMEOUT_SECS,
        )
        wrong = _judge(good, batch, outcome.events)
        if outcome.exit_code != 0:
            at = [event["number"] for event in outcome.events if "number" in event]
            wrong.append(f"died at {batch[at[-1]] if at else 'the start'}: {outcome}")
        return wrong

    wrong = [line for lines in pool.map(job, enumerate(batches)) for line in lines]
    assert not wrong, f"{len(wrong)} of {len(changes)}:\n" + "\n".join(wrong[:40])


def _judge(good: Path, batch: list[Change], events: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the outcomes of a batch, one line each."""
    wrong: list[str] = []
    for event in events:
        if "outcome" not in event or event["outcome"] == "no change":
            continue
        change = batch[event["number"]]
        names = [str(part) for part in change[1:3] if isinstance(part, str)]
        if event["outcome"] not in ("same", "raised"):
            wrong.append(f"{change}: {event['outcome']}")
        elif event["outcome"] == "raised":
            named = [*(Path(name).name for name in names), "leaf"]
            if not any(event["where"]) and not any(name in event["text"] for name in named):
                wrong.append(f"{change}: names neither file nor leaf: {event['text']}")
        is_marker = (good / change[1]).is_file() and not (good / change[1]).stat().st_size
        if event.get("verified") is not False and not is_marker:
            wrong.append(f"{change}: verify gives {event.get('verified')}")
    return wrong
