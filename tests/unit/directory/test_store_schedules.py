"""Random interleavings of writers in a store, request by request: what is acknowledged is there, and whole."""

import itertools
import os
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._directory import object_store, store_attempt
from ckpt_core._storage import KeyValues
from tests.support.stores import backend, keys_at, tree, value_at

SCHEDULES = int(os.environ.get("CKPT_SCHEDULES", "120"))
_numbers = itertools.count()


class Died(BaseException):
    """The process of a writer has ended; it does nothing any more."""


class Schedule:
    """Lets one of several threads go on at a time, up to its next request, in a random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.told: dict[str, str] = {}
        self.requests: list[str] = []
        self._waiting: set[str] = set()
        self._running = 0
        self._chosen = ""
        self._dies_after: dict[str, int] = {}
        self._changed = threading.Condition()

    def run(self, works: dict[str, Callable[[], None]]) -> None:
        """Runs each work in a thread of its name; one that begins with ``dead`` dies at some request."""
        self._running = len(works)
        for name in works:
            if name.startswith("dead"):
                self._dies_after[name] = self.random.randrange(40)
        threads = [
            threading.Thread(name=name, target=self._work, args=(name, work), daemon=True)
            for name, work in works.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), self.requests[-5:]

    def _work(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
            self.told[name] = "done"
        except ckpt.CheckpointExists:
            self.told[name] = "refused"
        except Died:
            self.told[name] = "died"
        except BaseException as error:
            self.told[name] = f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                self._running -= 1
                self._choose()

    def _choose(self) -> None:
        if self._waiting and len(self._waiting) == self._running:
            self._chosen = self.random.choice(sorted(self._waiting))
            self._waiting.discard(self._chosen)
            self._changed.notify_all()

    def turn(self, doing: str) -> None:
        """Blocks a thread of this schedule until it is its turn."""
        name = threading.current_thread().name
        if name not in self._dies_after and not name.startswith(
            ("save", "over", "delete", "clean")
        ):
            return
        with self._changed:
            self._waiting.add(name)
            self._choose()
            assert self._changed.wait_for(lambda: self._chosen == name, 60)
            self._chosen = ""
            self.requests.append(f"{name}: {doing}")
        if name in self._dies_after:
            self._dies_after[name] -= 1
            if self._dies_after[name] < 0:
                raise Died


def schedule_requests(patch: Any, schedule: Schedule) -> None:
    """Gives each request of ``KeyValues`` a turn of its own, and each of two pages of a listing."""
    real = {name: getattr(KeyValues, name) for name in ("get", "get_version", "put", "list")}
    real_delete, real_put_if = KeyValues.delete, KeyValues.put_if_unchanged

    def one_turn(name: str) -> Callable[..., Any]:
        def method(keys: KeyValues, *arguments: Any) -> Any:
            schedule.turn(f"{name} {arguments[0]}")
            return real[name](keys, *arguments)

        return method

    for name in ("get", "get_version", "put"):
        patch.setattr(KeyValues, name, one_turn(name))

    def put_all(keys: KeyValues, values: dict[str, bytes]) -> None:
        for key, value in values.items():
            keys.put(key, value)

    def put_if_unchanged(keys: KeyValues, key: str, value: bytes, version: Any) -> bool:
        schedule.turn(f"put_if {key}")
        return real_put_if(keys, key, value, version)

    def delete(keys: KeyValues, names: Any) -> None:
        for name in names:
            schedule.turn(f"delete {name}")
            real_delete(keys, [name])

    def pages(keys: KeyValues, prefix: str = "") -> list[str]:
        schedule.turn(f"list {prefix}")
        first = sorted(real["list"](keys, prefix))
        first = first[: schedule.random.randrange(len(first) + 1)]
        schedule.turn(f"list {prefix} on")
        last = first[-1] if first else ""
        return first + [key for key in real["list"](keys, prefix) if key > last]

    patch.setattr(KeyValues, "put_all", put_all)
    patch.setattr(KeyValues, "put_if_unchanged", put_if_unchanged)
    patch.setattr(KeyValues, "delete", delete)
    patch.setattr(KeyValues, "list", pages)
    owner, lives = object_store.this_owner, store_attempt.lives

    def owner_of_the_thread() -> str:
        name = threading.current_thread().name
        return name.replace(" ", "-") if name.startswith("dead") else owner()

    def lives_in_the_schedule(process: str) -> bool | None:
        name = process.replace("-", " ")
        return schedule.told.get(name) != "died" if name.startswith("dead") else lives(process)

    patch.setattr(object_store, "this_owner", owner_of_the_thread)
    patch.setattr(store_attempt, "lives", lives_in_the_schedule)


def works_at(url: str, kinds: list[str]) -> dict[str, Callable[[], None]]:
    """Name -> work; the number at the end of the name of a save is the value that it saves."""
    works: dict[str, Callable[[], None]] = {}
    for number, kind in enumerate(kinds, 1):
        state = tree(number)
        work: dict[str, Callable[[], None]] = {
            "save": lambda state=state: ckpt.save(url, state),
            "over": lambda state=state: ckpt.save(url, state, overwrite=True),
            "dead save": lambda state=state: ckpt.save(url, state),
            "dead over": lambda state=state: ckpt.save(url, state, overwrite=True),
            "dead delete": lambda: backend().delete(url),
            "delete": lambda: backend().delete(url),
            "clean": lambda: [None, backend().clean(url.rpartition("/")[0])][0],
        }
        works[f"{kind} {number}"] = work[kind]
    return works


KINDS = ["save", "over", "dead save", "dead over", "dead delete", "delete", "clean"]


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_whatever_the_order_of_requests(seed, monkeypatch):
    run = f"memory://schedules-{os.getpid()}-{next(_numbers)}/run"
    url, schedule = f"{run}/1", Schedule(seed)
    existed = schedule.random.random() < 0.6
    if existed:
        ckpt.save(url, tree(0))
    kinds = schedule.random.choices(KINDS, k=schedule.random.choice([2, 2, 3]))
    with monkeypatch.context() as patch:
        schedule_requests(patch, schedule)
        schedule.run(works_at(url, kinds))
        check_the_end(run, url, schedule, existed)


def check_the_end(run: str, url: str, schedule: Schedule, existed: bool) -> None:
    told = schedule.told
    assert {how.partition(":")[0] for how in told.values()} <= {"done", "refused", "died"}, told

    found = value_at(url)
    saved = {int(name[-1]) for name, how in told.items() if how == "done" and "e " in name}
    saved -= {int(name[-1]) for name in told if "delete" in name}
    saved |= {int(name[-1]) for name, how in told.items() if how == "done" and "over" in name}
    may_be = saved | {int(name[-1]) for name, how in told.items() if how == "died"}
    deleted = any("delete" in name and how != "refused" for name, how in told.items())
    if existed and not saved:
        may_be.add(0)
    assert found in may_be or (found is None and (deleted or not (existed or saved))), (told, found)
    if not deleted and not existed:
        assert sum("save" in name and how == "done" for name, how in told.items()) <= 1, told
    check_the_rest(run, url, found)


def check_the_rest(run: str, url: str, found: int | None) -> None:
    """After the next clean-up nothing is left of dead writers, and Orbax sees what ckpt sees."""
    backend().clean(run)
    assert value_at(url) == found
    if found is not None:
        report = ckpt.verify(url)
        assert report.ok, report.problems
        names = keys_at(url).list()
        assert "commit_success.txt" in names
        ckpt.save(f"{run}/fresh", tree(found))
        assert sorted(map(without_token, names)) == sorted(
            map(without_token, keys_at(f"{run}/fresh").list())
        )
    ckpt.save(url, tree(77), overwrite=found is not None)
    assert value_at(url) == 77 and ckpt.verify(url).ok
    backend().delete(url)
    assert keys_at(url).list() == []


def without_token(name: str) -> str:
    return re.sub("[0-9a-f]{32}", "-", name)
