"""Local steps after a restart with more or fewer processes: put together from the parts that are there.

What the persistent directory holds of saved steps is destroyed before the restores that must not read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import launch, reports
from tests.unit.processes.test_lost_hosts import COMMON

ROWS = (
    COMMON
    + """
def state(step, by):
    rows = np.arange(24 << 9, dtype=np.float32).reshape(24, -1) / 7 + step
    return {
        "rows": put(rows, by),
        "columns": put(rows.T[:4], P(None, "data") if by != P() else by),
        "half": put(rows.astype(jax.numpy.bfloat16), by),
        "little": put(np.arange(24, dtype=np.int32) + step, by),
        "everywhere": put(rows[:2, :9], P()),
        "host": rows[0, :5],
        "text": f"step {step}",
        "n": step,
    }

def there():
    with start(by) as checkpointer:
        return checkpointer.all_steps()

def hidden():
    return len(list(own.rglob(".ckpt-tmp.*")))

def folders():
    return sorted(path.name for path in own.glob("run-*/*"))
"""
)


def run(tmp_path: Path, processes: int, code: str, devices: int = 1) -> list[dict[str, Any]]:
    text = ROWS + code + "\ntold['hidden'] = hidden()\nreport(**told)\n"
    told = reports(launch(text, tmp_path / "run", processes=processes, devices=devices))
    assert not any(one["hidden"] for one in told)
    return told


SAVES = """
by = P("data")
train(3, by)
on(0, destroy_persistent)
"""
GOES_ON = """
by = P("data")
told["there"] = there()
told["restored"] = restored(by)
told["again"] = restored(by)
train(5, by)
told["went on"] = restored(by)
told["folders"] = folders()
on(0, destroy_persistent)
"""


def check_there_and_back(
    tmp_path: Path, before: int, after: int, devices: int = 1, settings: str = ""
) -> None:
    run(tmp_path, before, settings + SAVES, devices)
    for told in run(tmp_path, after, settings + GOES_ON, devices):
        assert 3 in told["there"]
        assert told["restored"] == told["again"] == [3, "local"]
        assert told["went on"] == [5, "local"]
        assert all(name.endswith(f"-of-{after}") for name in told["folders"])  # the others are gone
    if after > before + 1:  # then two that were partners of each other are gone
        return
    back = settings + GOES_ON.replace("train(5", "train(7")
    for told in run(tmp_path, before, back, devices):
        assert told["restored"] == told["again"] == [5, "local"]
        assert told["went on"] == [7, "local"]


def test_from_three_to_two_and_back(tmp_path: Path) -> None:
    """The part of the process that is gone comes from its partner's copy."""
    check_there_and_back(tmp_path, 3, 2)


PIPELINE = """
import grain.python as grain

def data():
    numbers = grain.MapDataset.range(100)[index::count].shuffle(seed=3).repeat()
    few = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(numbers.batch(2).to_iter_dataset(few))

by = P()
"""


def test_one_process_is_enough_if_it_holds_everything(tmp_path: Path) -> None:
    """A pipeline of another number of processes is refused, as it is from the persistent directory."""
    saves = """
batches = data()
with start(by) as checkpointer:
    for step in range(3):
        next(batches)
        checkpointer.save(step, state=state(step, by), data=batches, metadata={"at": step})
"""
    run(tmp_path, 3, PIPELINE + saves)
    restores = """
with start(by) as checkpointer:
    both = {"state": state(99, by), "data": data()}
    told["refused"] = raised(lambda: checkpointer.restore_latest(items=both))
    told["as ever"] = raised(lambda: checkpointer.restore(0, items=both))
    told["after"] = checkpointer.all_steps()
    found = checkpointer.restore_latest(state=state(99, by))
    assert same(found["state"], found.step, by)
    loaded = checkpointer.load(2, state(99, by), item="state")
    told["without"] = found.step, found.path.startswith(str(own)), same(loaded, 2, by)
    told["asked"] = checkpointer.metadata(2), sorted(checkpointer.inspect(2).items)
"""
    for processes in (1, 2):
        for told in run(tmp_path, processes, PIPELINE + restores):
            for case in ("refused", "as ever"):
                assert told[case]["type"] == "StructureMismatch"
                assert f"number differs: saved 3, wanted {processes}" in told[case]["text"]
            assert told["after"] == [0, 2]
            assert told["without"] == [2, True, True]
            assert told["asked"] == [{"at": 2}, ["data", "state"]]
    for told in run(tmp_path, 1, PIPELINE + "train(3, by)\ntold['one'] = restored(by)"):
        assert told["one"] == [3, "local"]
    for told in run(tmp_path, 2, PIPELINE + "told['two'] = restored(by)"):
        assert told["two"] == [3, "local"]


LOST = """
by = P("data")
def start(by, local=own, read_only=False):
    options = ckpt.Options(timeout_secs=20, persist_policy=ckpt.when.at_steps([0, 2]))
    return ckpt.Checkpointer(
        persistent, local_directory=local, options=options, read_only=read_only
    )
"""
DAMAGED = """
def damage_one():
    folder = next(own.glob("run-*/process_1-of-3/3"))
    file = max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

from ckpt_core._run.tiers import joining
told["read-only"] = restored(by, read_only=True)
joining._SHARE_OF_TIME = 0.0
told["late"] = raised(lambda: restored(by))["text"]
joining._SHARE_OF_TIME = 0.5
told["in time"] = restored(by)
on(1, damage_one)
told["damaged"] = restored(by)
"""


def test_what_cannot_be_had_comes_from_the_persistent_copy(tmp_path: Path) -> None:
    """Also what only a reader asks for: nothing is brought to it. What is not here in time is no damage."""
    run(tmp_path, 3, LOST + "train(3, by)")
    lost = "told['restored'] = restored(by)\ntold['there'] = there()"
    for told in run(tmp_path, 2, LOST + lost):  # what the third one had, no other has
        assert told == {"restored": [2, "persistent"], "there": [0, 2], "hidden": 0}
    for told in run(tmp_path, 4, LOST + DAMAGED):
        assert told["in time"] == [3, "local"]
        assert "Nothing is damaged" in told["late"]
        for case in ("read-only", "damaged"):
            assert told[case] == [2, "persistent"], case


DIFFERENT = """
by = P("data")
values = {"rows": put(np.arange(24.0), by), "mine": np.arange(3) + index}
"""


def test_values_of_processes_that_are_gone_are_not_dropped(tmp_path: Path) -> None:
    """What goes to the persistent directory must be equal on all; a local part may have its own."""
    saves = """
with start(by) as checkpointer:
    checkpointer.save(0, values | {"mine": np.arange(3)})
    checkpointer.save(1, values)
"""
    run(tmp_path, 2, DIFFERENT + saves)
    asks = """
with start(by) as checkpointer:
    told["there"] = checkpointer.all_steps()
    found = checkpointer.restore_latest(state=values)
    told["mine"] = found.step, found["state"]["mine"].tolist()
"""
    for told in run(tmp_path, 3, DIFFERENT + asks):
        assert told["there"] == [0] and told["mine"] == [0, [0, 1, 2]]
    for index, told in enumerate(run(tmp_path, 2, DIFFERENT + asks)):
        assert told["mine"] == [1, [index, index + 1, index + 2]]


def test_a_run_that_still_lives_saves_no_more(tmp_path: Path) -> None:
    """Its processes lose their directories to the one that goes on, of another number."""
    code = """
import subprocess, sys
by = P()
checkpointer = start(by)
checkpointer.save(1, {"n": 1})
checkpointer.wait_until_finished()
meet("saved")
later = f'''
import ckpt_core as ckpt
options = ckpt.Options(persist_policy=ckpt.when.at_steps([]))
with ckpt.Checkpointer({str(persistent)!r}, local_directory={str(own)!r}, options=options) as later:
    found = later.restore_latest(state={{"n": 0}})
    assert found.step == 1 and found["state"] == {{"n": 1}}, found
    later.save(2, {{"n": 2}})
'''
if index == 0:
    done = subprocess.run([sys.executable, "-c", later], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
meet("later")
def save():
    checkpointer.save(3, {"n": 3})
    checkpointer.wait_until_finished()
told["refused"] = raised(save)
told["closed"] = raised(checkpointer.close)
told["left"] = folders()
"""
    first, second = run(tmp_path, 2, code)
    for told in (first, second):
        assert "another Checkpointer" in told["refused"]["text"], told
    assert "process_0-of-1" in first["left"] and second["left"] == ["process_1-of-2"]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "devices"), [(4, 3, 2), (3, 4, 1), (2, 4, 2)])
def test_other_numbers(tmp_path: Path, before: int, after: int, devices: int) -> None:
    check_there_and_back(tmp_path, before, after, devices)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["compression='zstd'", "broadcast=True"])
def test_other_numbers_with_other_options(tmp_path: Path, more: str) -> None:
    settings = f"""
plainly = start
def start(by, local=own, **more):
    return plainly(by, local, {more}, **more)
"""
    check_there_and_back(tmp_path, 3, 2, settings=settings)


ELASTIC = """
import grain
from grain import experimental as gx

def elastic():
    return gx.ElasticIterator(
        grain.MapDataset.range(960).seed(3).shuffle().repeat(), 24,
        grain.sharding.ShardOptions(index, count),
        read_options=grain.ReadOptions(num_threads=1, prefetch_buffer_size=2),
    )

def take(data, number):
    return [np.asarray(next(data)).tolist() for _ in range(number)]

by = P("data")
"""


def test_an_elastic_pipeline_goes_on_from_local_parts(tmp_path: Path) -> None:
    """With the global batches that the other number of processes would have had, and nothing of the persistent directory."""
    saves = """
data = elastic()
with start(by) as checkpointer:
    for step in range(3):
        take(data, 1)
        checkpointer.save(step, state=state(step, by), data=data)
        checkpointer.wait_until_finished()
        settle(checkpointer)
told["follows"] = take(data, 2)
on(0, destroy_persistent)
"""

    def batches(reports_of_all: list[dict[str, Any]]) -> list[list[int]]:
        rounds = zip(*(one["follows"] for one in reports_of_all), strict=True)
        return [sorted(element for part in parts for element in part) for parts in rounds]

    first = batches(run(tmp_path, 3, ELASTIC + saves))
    restores = """
data = elastic()
with start(by) as checkpointer:
    found = checkpointer.restore_latest(state=state(99, by), data=data)
    assert same(found["state"], found.step, by)
    told["found"] = found.step, found.path.startswith(str(own))
told["follows"] = take(data, 2)
"""
    for processes in (2, 4, 3):
        again = run(tmp_path, processes, ELASTIC + restores)
        assert [one["found"] for one in again] == [[2, True]] * processes
        assert batches(again) == first
