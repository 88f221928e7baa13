"""What a store refuses is refused, whatever the body of its answer is, and what one's rights reach is enough.

A listing that Google's store refuses has a body of JSON, which TensorStore takes for a listing of nothing: training
started afresh beside its own steps.
"""

import threading
import urllib.parse
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._storage import KeyValues, Location, location
from tests.support.fault_proxy import Request
from tests.support.gcs_server import Server
from tests.support.stores import make_s3_url, make_server  # noqa: F401 (fixtures)
from tests.unit.faults.test_store_faults import make_spoiled  # noqa: F401 (fixture)


def tree(step: int) -> dict[str, Any]:
    return {"n": step, "w": np.full(1000, step, np.float32)}


@pytest.fixture(autouse=True)
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between them are no matter here."""
    monkeypatch.setattr(location, "_LISTINGS", 3)


BODIES = [b"", b'{"error": {"code": 403, "message": "no"}}', b'{"kind": "storage#objects"}']


@pytest.mark.parametrize(("status", "body"), [(401, 0), (403, 1), (403, 2)])
def test_no_call_takes_a_refused_listing_for_nothing(server, status, body):
    reader = _refusing(server, status, body)
    before = dict(server.objects)
    for call in (
        reader.latest_step,
        lambda: reader.restore_latest(state=tree(9)),
        lambda: ckpt.Checkpointer(f"{server.root}/run").restore_latest(state=tree(9)),
        lambda: ckpt.load(f"{server.root}/nothing"),
    ):
        _assert_refused(server, status, call)
    server.fault = lambda _: None
    assert before.items() <= server.objects.items()
    assert reader.restore_latest(state=tree(9)).step == 0


def _refusing(server: Server, status: int, body: int) -> ckpt.Checkpointer:
    """Saves a step; from then on the server refuses all listings. The run, opened to read."""
    url = f"{server.root}/run"
    with ckpt.Checkpointer(url) as checkpointer:
        checkpointer.save(0, tree(0))
    server.refusal = BODIES[body]
    server.fault = lambda request: status if request.kind == "list" else None
    return ckpt.Checkpointer(url, read_only=True)


def _assert_refused(server: Server, status: int, call: Callable[[], object]) -> None:
    with pytest.raises(PermissionError, match="credentials") as caught:
        call()
    assert str(status) in str(caught.value) and server.root in str(caught.value)


@pytest.mark.parametrize("body", range(len(BODIES)))
def test_a_listing_that_is_refused_at_its_second_page_is_refused(server, body):
    for number in range(1500):
        server.objects[f"run/{number:04}"] = (1, b"")
    server.refusal = BODIES[body]
    listed: list[str] = []

    def second(request: Any) -> int | None:
        listed.append(request.kind)
        return 403 if request.kind == "list" and len(listed) > 1 else None

    server.fault = second
    with pytest.raises(PermissionError):
        KeyValues(Location(f"{server.root}/run", False)).list()


def _inside(request: Request, below: str) -> bool:
    """Whether a request asks for nothing but what lies below a prefix."""
    if request.key is not None:
        return request.key.startswith(below)
    query = urllib.parse.parse_qs(request.path.partition("?")[2])
    first = query.get("prefix") or query.get("startOffset") or [""]
    return first[0].startswith(below)


@pytest.mark.parametrize("spoiled", ["gs", "s3"], indirect=True)
def test_rights_below_the_run_are_enough(spoiled):
    proxy, around = spoiled
    url = f"{around}/team/run"
    below = url.partition("://")[2].partition("/")[2] + "/"
    refused = list[str]()
    lock = threading.Lock()

    def rule(request: Request) -> Any:
        if _inside(request, below):
            return None
        with lock:
            refused.append(request.path)
        return 403, b'{"error": {"code": 403}}'

    proxy.rule = rule
    with ckpt.Checkpointer(url, max_to_keep=2, step_prefix="s") as checkpointer:
        assert checkpointer.restore_latest(state=tree(9)) is None
        for step in range(4):
            checkpointer.save(step, tree(step), metrics={"loss": step})
        checkpointer.wait_until_finished()
        checkpointer.write_run_metadata({"a": 1})
        assert checkpointer.run_metadata == {"a": 1}
    with ckpt.Checkpointer(url, step_prefix="s") as checkpointer:
        assert checkpointer.restore_latest(state=tree(9)).state["n"] == 3
        checkpointer.rollback_to(2)
        assert checkpointer.all_steps() == [2]
    assert ckpt.load(f"{url}/s_2")["n"] == 2
    assert ckpt.verify(f"{url}/s_2").ok
    assert ckpt.inspect(f"{url}/s_2").items["state"].leaves
    with pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load(f"{url}/s_7")
    # the checkpoint is the prefix itself
    proxy.rule = lambda _: None
    one = f"{around}/team/one"
    below = one.partition("://")[2].partition("/")[2] + "/"
    proxy.rule = rule
    ckpt.save(one, tree(1))
    ckpt.save(one, tree(2), overwrite=True)
    assert ckpt.load(one)["n"] == 2 and ckpt.verify(one).ok
    assert ckpt.inspect(one).items["state"].leaves
    assert ckpt.load(f"{one}/state")["n"] == 2
    assert refused, "nothing was asked for outside: the test refuses nothing"
    proxy.reset()
