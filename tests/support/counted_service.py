"""A coordination service in memory that counts what it sends to each process; processes are threads."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import pytest

from ckpt_core import _processes


class Keys:
    """The keys that ``Processes`` puts, gets and drops, in memory; counts what it is asked for.

    Attributes:
        values: by name.
        gets: number of keys that were asked for.
        sent_bytes: of their values.
    """

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.gets = self.sent_bytes = 0

    def put(self, name: str, text: str) -> None:
        self.values[name] = text

    def get(self, name: str) -> str | None:
        self.gets += 1
        self.sent_bytes += len(self.values.get(name, ""))
        return self.values.get(name)

    def drop(self, name: str) -> None:
        below = f"{name}/"
        self.values = {
            one: text for one, text in self.values.items() if not f"{one}/".startswith(below)
        }


class Service:
    """Keys, and the bytes that the service sent and got; by process. Of keys and values, but for ``value_bytes``."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.sent_bytes: Counter[int] = Counter()
        self.got_bytes: Counter[int] = Counter()
        self.value_bytes: Counter[int] = Counter()
        self.requests: Counter[int] = Counter()

    def forget(self) -> None:
        """Counts from here on."""
        for counter in (self.sent_bytes, self.got_bytes, self.value_bytes, self.requests):
            counter.clear()


class Client:
    """What ``_processes`` uses of jax's client of the service."""

    def __init__(self, service: Service, index: int) -> None:
        self._service, self._index = service, index
        self.rounds = itertools.count()

    def _sent(self, *values: str) -> None:
        self._service.requests[self._index] += 1
        self._service.sent_bytes[self._index] += sum(map(len, values))

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        service = self._service
        with service.changed:
            assert allow_overwrite or key not in service.values, key
            service.requests[self._index] += 1
            service.got_bytes[self._index] += len(key) + len(value)
            service.value_bytes[self._index] += len(value)
            service.values[key] = value
            service.changed.notify_all()

    def blocking_key_value_get(self, key: str, wait_ms: int) -> str:
        service, until = self._service, time.monotonic() + wait_ms / 1000
        with service.changed:
            while key not in service.values:
                left_secs = until - time.monotonic()
                if left_secs <= 0:
                    raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
                service.changed.wait(left_secs)
            self._sent(service.values[key])
            return service.values[key]

    def key_value_try_get(self, key: str) -> str:
        with self._service.changed:
            if key not in self._service.values:
                raise jax.errors.JaxRuntimeError("NOT_FOUND")
            self._sent(self._service.values[key])
            return self._service.values[key]

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        with self._service.changed:
            found = [one for one in self._service.values.items() if one[0].startswith(folder)]
            self._sent(*(text for pair in found for text in pair))
            return found

    def key_value_delete(self, key: str) -> None:
        values, folder = self._service.values, f"{key.rstrip('/')}/"
        with self._service.changed:
            for name in [one for one in values if one == key or one.startswith(folder)]:
                del values[name]


def run_all(
    monkeypatch: pytest.MonkeyPatch,
    service: Service,
    count: int,
    work: Callable[[_processes.Processes], Any],
) -> list[Any]:
    """What ``work`` gives in each of ``count`` processes, all at once; the first error is raised."""
    own = threading.local()
    monkeypatch.setattr(_processes, "coordination", lambda: own)
    monkeypatch.setattr(_processes.wire, "rounds", lambda client: client.rounds)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(index: int) -> None:
        own.client, own.address = Client(service, index), None
        try:
            results[index] = work(_processes.Processes(index, count))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results
