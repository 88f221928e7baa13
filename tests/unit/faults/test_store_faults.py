"""A store whose answers fail: nothing that was acknowledged is lost, nothing wrong is returned, every call ends."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._errors import is_visible
from ckpt_core._storage import location
from tests.support.fault_proxy import Fault, Proxy, Request, proxied
from tests.support.gcs_server import Server
from tests.support.stores import BUCKET, backend, keys_at, tree, value_at

pytestmark = pytest.mark.faults
KINDS: list[Fault] = [503, 429, "reset", "truncate", "flip", "lost"]
SEEDS = int(os.environ.get("CKPT_FAULT_SEEDS", "6"))
EXPECTED = (OSError, ckpt.CheckpointError)
"""What a call may raise, of a store that fails; docs/object_stores.md has a table."""


@pytest.fixture(name="spoiled", params=["gs", "s3"])
def make_spoiled(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Proxy, str]]:
    """A proxy in front of a store, and a URL whose requests pass it; little time goes between repetitions."""
    tries = {"max_retries": 12, "initial_delay": "1ms", "max_delay": "8ms"}
    monkeypatch.setattr(location, "_RETRIES", tries)
    if request.param == "gs":
        server: Server = request.getfixturevalue("server")
        with proxied(server.url) as proxy:
            monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", proxy.url)
            yield proxy, f"{server.root}/run"
        return
    with proxied(request.getfixturevalue("s3_url")) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield proxy, f"s3://{BUCKET}/spoiled-{os.getpid()}-{proxy.url[-5:]}"


def _some(seed: int, kind: Fault, share: float = 0.3) -> Callable[[Request], Fault | None]:
    """Spoils so many of the requests."""
    chosen = random.Random(seed)
    return lambda _: kind if chosen.random() < share else None


def _told(work: Callable[[], Any]) -> BaseException | None:
    try:
        work()
    except EXPECTED as error:
        return error
    return None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_three_in_ten_answers_fail(spoiled, kind, seed):
    proxy, url = spoiled
    ckpt.save(f"{url}/old", tree(7))
    ckpt.save(f"{url}/replaced", tree(7))
    works: dict[str, Callable[[], Any]] = {
        "new": lambda: ckpt.save(f"{url}/new", tree(1)),
        "replaced": lambda: ckpt.save(f"{url}/replaced", tree(1), overwrite=True),
    }
    proxy.rule = _some(seed, kind)
    told = {name: _told(work) for name, work in works.items()}
    assert proxy.struck
    for _ in range(3):
        error = _told(lambda: _is(value_at(f"{url}/old"), 7, kind))
        assert kind == "flip" or error is None, error
    proxy.reset()
    assert value_at(f"{url}/old") == 7
    for name, error in told.items():
        before = 7 if name == "replaced" else None
        found = value_at(f"{url}/{name}")
        assert found == 1 if error is None else found in (1, before), (name, error)
        # only a body that says something else can end a call; everything else is repeated
        assert error is None or kind == "flip", (name, error)
        if found is not None:
            backend().clean(url)
            assert ckpt.verify(f"{url}/{name}").ok
        ckpt.save(f"{url}/{name}", tree(2), overwrite=found is not None)
        assert value_at(f"{url}/{name}") == 2


def _is(found: int | None, expected: int, kind: Fault) -> None:
    """A flipped bit may hide a name in a listing, and never changes a value."""
    assert found == expected or (kind == "flip" and found is None)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_bit_that_flips_on_the_way_is_noticed_at_every_answer(spoiled, compression):
    proxy, url = spoiled
    options = ckpt.Options(compression=compression)
    state = tree(3) | {"large": np.arange(2**18), "words": "some text"}
    ckpt.save(f"{url}/a", state, options=options)
    proxy.reset()
    ckpt.load(f"{url}/a")
    count = len(proxy.requests)
    noticed = 0
    for number in range(1, count + 1):
        proxy.reset()
        proxy.rule = lambda request, number=number: "flip" if request.number == number else None
        try:
            found = ckpt.load(f"{url}/a")
        except ckpt.CheckpointError:
            noticed += 1
        else:
            assert found["words"] == "some text" and found["n"] == 3
            for name in ("w", "small", "large"):
                assert np.array_equal(found[name], state[name]), (number, name)
    assert noticed > 1


@pytest.mark.parametrize("kind", [503, "reset", "truncate"])
def test_a_store_that_breaks_down_for_good_is_told(spoiled, kind):
    """From some request on no answer is right any more."""
    proxy, url = spoiled
    ckpt.save(f"{url}/0", tree(0))
    proxy.reset()
    ckpt.save(f"{url}/1", tree(1))
    count = len(proxy.requests)
    for first in range(1, count + 1, 3):
        proxy.reset()
        proxy.rule = lambda request, first=first: kind if request.number >= first else None
        error = _told(lambda first=first: ckpt.save(f"{url}/at-{first}", tree(first)))
        # truncated answers to puts have no body that could be too short, and tidying up may fail
        harmless = kind == "truncate" or all(told.method == "DELETE" for told, _ in proxy.struck)
        assert isinstance(error, ConnectionError) or harmless, (first, error)
        if error is not None:
            assert url in str(error) and "try again" in str(error)
        load_error = _told(lambda: ckpt.load(f"{url}/0"))
        assert isinstance(load_error, ConnectionError), load_error
        proxy.reset()
        found = value_at(f"{url}/at-{first}")
        assert found == first if error is None else found in (first, None)
        assert found is None or error is None or is_visible(error)
        assert value_at(f"{url}/0") == 0
        backend().clean(url)
        ckpt.save(f"{url}/at-{first}", tree(2), overwrite=found is not None)
        assert value_at(f"{url}/at-{first}") == 2


def test_answers_that_never_come_are_asked_for_again(spoiled, run_python):
    """TensorStore reads the time limit at its first request, hence a process of its own."""
    proxy, url = spoiled
    stalled = {3, 7, 11, 16}
    proxy.rule = lambda request: "stall" if request.number in stalled else None
    code = """
import json, sys
import numpy as np
import ckpt_core as ckpt
ckpt.save(sys.argv[1], {"w": np.arange(5000)})
print(json.dumps(int(ckpt.load(sys.argv[1])["w"].sum())))
"""
    limits = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "1"}
    assert run_python(code, f"{url}/stalled", **limits) == sum(range(5000))
    assert {request.number for request, _ in proxy.struck} == stalled


def test_a_checkpointer_keeps_every_acknowledged_step(spoiled):
    """Everything that fails at once, and now and then; a save that fails is tried again, as a loop would."""
    proxy, url = spoiled
    chosen = random.Random(5)
    kinds: list[Fault] = [503, 429, 500, "reset", "truncate", "lost"]
    proxy.rule = lambda _: chosen.choice(kinds) if chosen.random() < 0.3 else None
    acknowledged = []
    with ckpt.Checkpointer(f"{url}/steps", max_to_keep=2) as checkpointer:
        for step in range(5):
            assert checkpointer.save(step, tree(step))
            checkpointer.wait_until_finished()
            acknowledged.append(step)
            assert checkpointer.latest_step() == step
            assert checkpointer.load(step)["n"] == step
    with ckpt.Checkpointer(f"{url}/steps") as checkpointer:
        assert checkpointer.restore_latest(tree(9)).state["n"] == 4
    proxy.reset()
    assert ckpt.Checkpointer(f"{url}/steps", read_only=True).all_steps() == [3, 4]
    assert [value_at(f"{url}/steps/{step}") for step in (3, 4)] == [3, 4]


REFUSALS = [
    (400, "ExpiredToken", PermissionError),
    (403, "AccessDenied", PermissionError),
    (400, "AuthorizationHeaderMalformed", OSError),  # another region's
    (301, "PermanentRedirect", OSError),
]


@pytest.mark.parametrize(
    ("status", "code", "kind"), REFUSALS, ids=[code for _, code, _ in REFUSALS]
)
@pytest.mark.parametrize("spoiled", ["s3"], indirect=True)
def test_a_refusal_of_s3_is_no_damage(spoiled, status, code, kind):
    """Credentials that expire give a 400 there; at no request may a restore go back a step because of one."""
    proxy, url = spoiled
    with ckpt.Checkpointer(url) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step, tree(step))
    reader = ckpt.Checkpointer(url, read_only=True)
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    proxy.reset()
    assert reader.restore_latest(tree(9)).state["n"] == 1
    # without the record of step 0 nobody knows whether step 1 continues another save of it, and it is whole all the same
    asked = [one.number for one in proxy.requests if not one.path.endswith("/0/ckpt.json")]
    for number in asked:
        proxy.reset()
        proxy.rule = lambda request, number=number: (
            (status, body) if request.number == number else None
        )
        with pytest.raises(kind, match=url) as caught:  # a warning of damage would fail
            reader.restore_latest(tree(9))
        assert type(caught.value) is kind and "the store refused" in str(caught.value)
    assert len(asked) >= 4


@pytest.mark.parametrize("spoiled", ["s3"], indirect=True)
def test_two_conditional_puts_that_collide_are_decided(spoiled):
    """Of two at one moment S3 refuses one with a 409, which means: try again."""
    proxy, url = spoiled
    body = b"<?xml version='1.0'?><Error><Code>ConditionalRequestConflict</Code></Error>"
    for number, overwrite in enumerate([False, True]):
        pending = [True]
        proxy.rule = lambda request, pending=pending: (
            (409, body)
            if request.method == "PUT"
            and str(request.key).endswith("ckpt.json")
            and pending
            and pending.pop()
            else None
        )
        ckpt.save(url, tree(number), overwrite=overwrite)
        assert not pending and value_at(url) == number


def test_who_may_not_delete_goes_on_training(spoiled, caplog):
    """Credentials of the kind that protect a bucket: each run leaves keys that the next one would remove."""
    proxy, url = spoiled
    proxy.rule = lambda request: 403 if request.method == "DELETE" else None
    for run in range(3):
        with ckpt.Checkpointer(url, max_to_keep=2) as checkpointer:
            restored = checkpointer.restore_latest(tree(0))
            assert (run == 0) == (restored is None)
            for step in (2 * run, 2 * run + 1):
                assert restored is None or restored.state["n"] == 2 * run - 1
                assert checkpointer.save(step, tree(step))
                checkpointer.wait_until_finished()
        _forget_owner(url)
    assert "cannot be deleted" in caplog.text and "could not delete" in caplog.text
    assert ckpt.Checkpointer(url, read_only=True).all_steps() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(PermissionError, match="cannot delete"):
        ckpt.Checkpointer(url).delete(1)
    proxy.reset()
    with ckpt.Checkpointer(url, max_to_keep=1) as checkpointer:
        assert checkpointer.restore_latest(tree(0)).state["n"] == 5
        checkpointer.save(6, tree(6))
    assert ckpt.Checkpointer(url, read_only=True).all_steps() == [6]
    assert not [key for key in keys_at(url).list() if key.endswith("/owner")]


def _forget_owner(url: str) -> None:
    """Makes the attempts that are there those of a dead process."""
    for key in keys_at(url).list():
        if key.endswith("/owner"):
            process, _, rest = (keys_at(url).get(key) or b"").decode().partition(" ")
            host = process.split("-")[0]
            keys_at(url).put(key, f"{host}-4194304-1 {rest}".encode())
