"""Statuses that TensorStore does not take for a refusal: of Google's store, whatever the body of the answer is.

It looks at no status of a listing, and of a single object it takes 412 for a condition that is not met, also
where there was none: a value of an unknown state, or a write that is not carried out, and no error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._storage import KeyValues, Location
from tests.support.gcs_server import Server
from tests.support.stores import make_server  # noqa: F401 (fixture)


def tree(step: int) -> dict[str, Any]:
    return {"n": step, "w": np.full(3000, step, np.float32)}


BODIES = [b"{}", b'{"error": {"code": 412}}', b'{"kind": "storage#objects"}']
ANSWERS = [(status, body) for status in (404, 405, 409, 410, 412, 451) for body in BODIES]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        pytest.param(*one, marks=[] if place % len(BODIES) == 0 else pytest.mark.slow)
        for place, one in enumerate(ANSWERS)
    ],
)
def test_no_refused_listing_is_an_empty_directory(server: Server, status: int, body: bytes) -> None:
    _assert_refused(server, _answering(server, status, body).all_steps)


@pytest.mark.parametrize(
    ("status", "body"),
    [pytest.param(*one, marks=[] if one == ANSWERS[0] else pytest.mark.slow) for one in ANSWERS],
)
def test_no_restore_takes_a_refused_listing_for_nothing(
    server: Server, status: int, body: bytes
) -> None:
    reader = _answering(server, status, body)
    url = f"{server.root}/run"
    _assert_refused(server, lambda: reader.restore_latest(state=tree(9)))
    _assert_refused(server, lambda: ckpt.Checkpointer(url).restore_latest(state=tree(9)))
    server.fault = lambda _: None
    assert reader.restore_latest(state=tree(9)).step == 0


def _answering(server: Server, status: int, body: bytes) -> ckpt.Checkpointer:
    """Saves a step; from then on the server answers all listings so. The run, opened to read."""
    url = f"{server.root}/run"
    with ckpt.Checkpointer(url) as checkpointer:
        checkpointer.save(0, tree(0))
    server.refusal = body
    server.fault = lambda request: status if request.kind == "list" else None
    return ckpt.Checkpointer(url, read_only=True)


def _assert_refused(server: Server, call: Callable[[], object]) -> None:
    with pytest.raises(OSError, match=server.root) as caught:
        call()
    assert not isinstance(caught.value, ckpt.CheckpointNotFound)


def test_keys_that_are_missing_disturb_no_listing(server: Server) -> None:
    """A poll for what is not there yet, all the time, in another thread."""
    server.objects["run/one"] = (1, b"")
    ended, polled = threading.Event(), [0]

    def poll() -> None:
        other = KeyValues(Location(f"{server.root}/other", False))
        missing = other.get_version("missing")[1]
        server.objects["other/there"] = (1, b"")
        while not ended.is_set():
            assert other.get("missing") is None
            assert not other.put_if_unchanged("there", b"", missing)
            polled[0] += 1

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        for _ in range(20):
            assert KeyValues(Location(f"{server.root}/run", False)).list() == ["one"]
    finally:
        ended.set()
        thread.join()
    assert polled[0] > 20


def test_an_object_that_the_store_refuses_is_not_missing(server: Server) -> None:
    """Not of compressed arrays: there TensorStore 0.1.86 ends the process at such an answer."""
    url = f"{server.root}/run"
    with ckpt.Checkpointer(url) as checkpointer:
        for step in range(2):
            checkpointer.save(step, tree(step))
    before = dict(server.objects)
    server.requests.clear()
    ckpt.load(f"{url}/1")
    reader = ckpt.Checkpointer(url, read_only=True)
    count, refused, missing = len(server.requests), 0, 0
    for number in range(1, count + 1):
        seen: list[Any] = []

        def fault(request: Any, seen: list[Any] = seen, number: int = number) -> int | None:
            seen.append(request)
            return 412 if len(seen) == number and request.kind == "get" else None

        server.fault = fault
        for call in (
            lambda: ckpt.load(f"{url}/1"),
            lambda: reader.restore_latest(state=tree(9)),
        ):
            seen.clear()
            try:
                call()
            except OSError as error:
                refused += "policies" in str(error)
                missing += isinstance(error, ckpt.CheckpointNotFound)
    server.fault = lambda _: None
    assert refused > 3 and not missing
    assert before.items() <= server.objects.items()
    assert reader.restore_latest(state=tree(9)).step == 1


def test_a_write_that_the_store_refuses_is_not_acknowledged(server: Server) -> None:
    ckpt.save(f"{server.root}/count", tree(0))
    count = sum(request.kind in ("put", "delete") for request in server.requests)
    refused = 0
    for number in range(1, count + 1):
        url, seen = f"{server.root}/at/{number}", list[Any]()

        def fault(request: Any, seen: list[Any] = seen, number: int = number) -> int | None:
            if request.kind in ("put", "delete"):
                seen.append(request)
                return 412 if len(seen) == number else None
            return None

        server.fault = fault
        try:
            ckpt.save(url, tree(number))
        except (OSError, ckpt.CheckpointError):
            refused += 1
            server.fault = lambda _: None
        else:
            server.fault = lambda _: None
            assert ckpt.load(url)["n"] == number and ckpt.verify(url).ok, seen[number - 1]
    assert refused > 3
