"""A store that refuses is not a damaged checkpoint: against a server of Google's JSON API, at every request."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._storage import location
from tests.support.gcs_server import Request

ZSTD = ckpt.Options(compression="zstd")


def tree(step: int) -> dict[str, Any]:
    values = np.arange(20_000.0) + step
    return {"large": values, "small": np.full(3, step), "text": f"step {step}"}


def at_request(number: int, status: int) -> Callable[[Request], int | None]:
    """Answers one request with a status, counted from 1."""
    seen: list[Request] = []

    def fault(request: Request) -> int | None:
        seen.append(request)
        return status if len(seen) == number else None

    return fault


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("options", [None, ZSTD], ids=["plain", "zstd"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_while_reading_is_no_damage(server, status, options):
    """One expired token does not make a restore go back a step, at whichever request it is refused."""
    with ckpt.Checkpointer(f"{server.root}/run", options=options) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step, tree(step))
    reader = ckpt.Checkpointer(f"{server.root}/run", read_only=True)
    server.requests.clear()
    assert reader.restore_latest(state=tree(9)).step == 1
    kinds = [request.kind for request in server.requests]
    assert kinds.count("get") > 3
    refused = 0
    for number in range(1, len(kinds) + 1):
        server.fault = at_request(number, status)
        try:
            restored = reader.restore_latest(state=tree(9))
        except PermissionError as error:
            refused += server.root in str(error) and "credentials" in str(error)
            continue
        assert restored is not None and restored.step == 1, number
        assert same(restored["state"], tree(1))
    assert refused >= 3
    server.fault = lambda _: None
    assert same(ckpt.load(f"{server.root}/run/1"), tree(1))


def test_a_refusal_while_saving_is_told_and_nothing_is_acknowledged(server):
    ckpt.save(f"{server.root}/count", tree(0))
    count = len(server.requests)
    saved, refused = 0, 0
    for number in range(1, count + 1):
        url = f"{server.root}/at/{number}"
        server.fault = at_request(number, 403)
        try:
            ckpt.save(url, tree(number))
            saved += 1
        except PermissionError as error:
            where = url.rpartition("/")[0]  # it is looked at whether that is a checkpoint
            refused += where in str(error) or "writing arrays" in str(error)
        server.fault = lambda _: None
        try:
            assert same(ckpt.load(url), tree(number))
        except ckpt.CheckpointNotFound:
            ckpt.save(url, tree(number))  # the way is free for another try
            assert same(ckpt.load(url), tree(number))
    assert refused > 10 and saved + refused == count


def test_a_store_that_never_answers_as_it_should_is_told_after_so_many_tries(server, monkeypatch):
    tries = {"max_retries": 3, "initial_delay": "1ms", "max_delay": "2ms"}
    monkeypatch.setattr(location, "_RETRIES", tries)
    server.fault = lambda _: 503
    with pytest.raises(ConnectionError, match=f"{server.root}/a.*try again"):
        ckpt.load(f"{server.root}/a")
    assert 1 < len(server.requests) <= 5
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(ConnectionError, match=r"s3://bucket/a.*try again"):
        ckpt.save("s3://bucket/a", tree(0))


def test_a_store_that_ignores_conditions_is_told_once(server):
    server.ignores_conditions = True
    with pytest.warns(RuntimeWarning, match="ignores conditional puts"):
        ckpt.save(f"{server.root}/a", tree(0))
    ckpt.save(f"{server.root}/b", tree(1))  # a second warning would fail
    assert ckpt.load(f"{server.root}/a")["text"] == "step 0"


@pytest.mark.parametrize("kind", ["get", "list", "put"])
def test_a_store_that_does_not_answer_ends_a_save_in_time(server, kind):
    ended = threading.Event()
    server.fault = lambda request: ended.wait(30) and None if request.kind == kind else None
    try:
        pending = ckpt.save_async(
            f"{server.root}/a", tree(0), options=ckpt.Options(timeout_secs=0.5)
        )
        with pytest.raises(TimeoutError, match=r"within 0\.5 s, which is Options.timeout_secs"):
            pending.result(timeout_secs=20)
    finally:
        ended.set()
    server.fault = lambda _: None
    with pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load(f"{server.root}/a")


def test_a_bucket_that_is_not_there(server):
    with pytest.raises(FileNotFoundError, match=r"gs://elsewhere/a.*no such bucket"):
        ckpt.save("gs://elsewhere/a", tree(0))
    with pytest.raises((FileNotFoundError, ckpt.CheckpointNotFound), match="gs://elsewhere/a"):
        ckpt.load("gs://elsewhere/a")


@pytest.mark.parametrize("url", ["s3://a/x", "s3://", "s3:///x", "gs:///x"])
def test_a_name_that_no_bucket_can_have(url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for call in (lambda: ckpt.save(url, tree(0)), lambda: ckpt.load(url)):
        with pytest.raises((ckpt.CheckpointError, ValueError), match=r"(?i)bucket|s3://"):
            call()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_is_on_its_way_when_an_upload_is_refused_is_removed_too(server, compression):
    first = threading.Lock()

    def refused(request: Request) -> int | None:
        if "/ocdbt.process_0/d/" not in request.name or request.kind != "put":
            return None
        if first.acquire(blocking=False):
            return 403
        time.sleep(0.5)  # while the save finds that it failed
        return None

    server.fault = refused
    state = {f"w{number}": np.random.default_rng(number).random(2**17) for number in range(8)}
    options = ckpt.Options(target_data_file_bytes=2**20, compression=compression)
    with pytest.raises(PermissionError):
        ckpt.save(f"{server.root}/a", state, options=options)
    sent = [request for request in server.requests if "/d/" in request.name]
    assert len({request.name for request in sent}) >= 4
    time.sleep(1)  # for those that came after the save had cleaned up
    assert not server.names()
