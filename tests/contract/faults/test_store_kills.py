"""A process is killed at a request to a store, at every one in turn: what was acknowledged is there, and whole.

Each request is met twice: once the store never hears of it, once it is carried out and the process dies before the
answer comes; on a server of Google's API and on SeaweedFS.
"""

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckpt_core as ckpt
from tests.contract.faults.harness import Children, Outcome
from tests.support.fault_proxy import Fault, Proxy, Request, proxied
from tests.support.gcs_server import Server
from tests.support.stores import BUCKET, backend, keys_at, tree, value_at

pytestmark = pytest.mark.faults
MOST_REQUESTS = 400


@dataclass
class Mortal:
    """Runs scenarios in children whose requests pass the proxy, and which die at one of them."""

    children: Children
    proxy: Proxy
    environment: dict[str, str]
    pid_file: Path

    def run(
        self, scenario: str, url: str, when: Callable[[Request], bool], applied: bool
    ) -> Outcome:
        """A child that dies at the first request for which ``when`` is true; ``applied``: when it is carried out."""
        dead: list[bool] = []

        def kill(request: Request) -> None:
            if not dead and when(request):
                dead.append(True)
                os.kill(int(self.pid_file.read_text()), signal.SIGKILL)

        def rule(request: Request) -> Fault | None:
            if not applied:
                kill(request)
            return "reset" if dead else None  # what was on its way to the store is lost as well

        self.proxy.reset()
        self.proxy.rule = rule
        self.proxy.applied = kill if applied else lambda _: None
        arguments = [scenario, url, self.environment, str(self.pid_file)]
        outcome = self.children.run("store_scenarios:run", arguments)
        self.proxy.drain()
        assert outcome.was_killed == bool(dead), str(outcome)
        assert dead or outcome.exit_code == 0, str(outcome)
        return outcome


def _mortal(
    children: Children, proxy: Proxy, variable: str, patch: pytest.MonkeyPatch, tmp_path: Path
) -> Mortal:
    patch.setenv(variable, proxy.upstream)
    return Mortal(children, proxy, {**os.environ, variable: proxy.url}, tmp_path / "pid")


@pytest.fixture(name="on_gs")
def make_on_gs(
    server: Server, plain_pool: Children, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Mortal, str]]:
    with proxied(server.url) as proxy:
        mortal = _mortal(plain_pool, proxy, "TENSORSTORE_GCS_HTTP_URL", monkeypatch, tmp_path)
        yield mortal, server.root


@pytest.fixture(name="on_s3")
def make_on_s3(
    s3_url: str, plain_pool: Children, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Mortal, str]]:
    for name, value in [("REGION", "us-east-1"), ("ACCESS_KEY_ID", "key")]:
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with proxied(s3_url) as proxy:
        yield (
            _mortal(plain_pool, proxy, "AWS_ENDPOINT_URL", monkeypatch, tmp_path),
            f"s3://{BUCKET}/kills-{os.getpid()}",
        )


def _steps(url: str) -> dict[int, int]:
    """Step -> the value that it holds; every step that is listed must be whole."""
    found: dict[int, int] = {}
    for step in ckpt.Checkpointer(url, read_only=True).all_steps():
        value = value_at(f"{url}/{step}")
        assert value is not None
        found[step] = value
    return found


def _nothing(mortal: Mortal, url: str) -> None:
    pass


def _two_steps(mortal: Mortal, url: str) -> None:
    with ckpt.Checkpointer(url, asynchronous=False) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step, tree(step))


def _dead_saves(mortal: Mortal, url: str) -> None:
    """A step; one that is committed and not copied; one that is not committed; one that is half deleted."""
    ckpt.save(f"{url}/1", tree(1))
    for place, last in [("committed", "ckpt.json"), ("begun", ".owner")]:
        mortal.run("save", f"{url}/{place}", lambda request, last=last: _puts(request, last), True)
    assert value_at(f"{url}/committed/1") == 1 and value_at(f"{url}/begun/1") is None
    ckpt.save(f"{url}/2", tree(2))
    keys_at(f"{url}/2").put(".attempt.0.owner", b"[]")
    keys_at(f"{url}/2").delete(["commit_success.txt", "ckpt.json"])


def _puts(request: Request, part: str) -> bool:
    return request.method in ("POST", "PUT") and part in (request.key or "")


def _check_save(url: str, acknowledged: list[int | None]) -> None:
    assert _steps(url) in ([{1: 1}] if acknowledged else [{}, {1: 1}])


def _check_overwrite(url: str, acknowledged: list[int | None]) -> None:
    assert _steps(url) in ([{1: 2}] if acknowledged else [{1: 1}, {1: 2}])


def _check_loop(url: str, acknowledged: list[int | None]) -> None:
    found = _steps(url)
    assert all(step == value for step, value in found.items())
    told = [0, 1, *(step for step in acknowledged if step is not None)]
    assert max(found) in (told[-1], told[-1] + 1)  # it may have died before it said so
    newest = [step for step in found if step <= told[-1]]
    assert newest[-1] == told[-1] and len(found) in (2, 3)


def _check_delete(url: str, acknowledged: list[int | None]) -> None:
    assert _steps(url) in ([{0: 0}] if acknowledged else [{0: 0}, {0: 0, 1: 1}])


def _check_clean(url: str, acknowledged: list[int | None]) -> None:
    assert _steps(url) == {1: 1} and _steps(f"{url}/committed") == {1: 1}
    assert value_at(f"{url}/begun/1") is None


def _check_go_on(url: str, acknowledged: list[int | None]) -> None:
    found = _steps(url)
    ended = [{0: 0, 1: 11, 2: 22}, {1: 11, 2: 22}]
    saved = [{0: 0, 1: 11}, *ended]
    assert found in {0: [{0: 0, 1: 1}, {0: 0}, *saved], 1: saved, 2: ended}[len(acknowledged)]


@dataclass(frozen=True)
class Scenario:
    """What is there before, what may be there after a kill, and how many requests there are at least."""

    prepare: Callable[[Mortal, str], None]
    check: Callable[[str, list[int | None]], None]
    requests: int


SCENARIOS = {
    "save": Scenario(_nothing, _check_save, 14),
    "overwrite": Scenario(lambda _, url: ckpt.save(f"{url}/1", tree(1)), _check_overwrite, 20),
    "loop": Scenario(_two_steps, _check_loop, 30),
    "delete": Scenario(_two_steps, _check_delete, 22),
    "clean": Scenario(_dead_saves, _check_clean, 9),
    "go on": Scenario(_two_steps, _check_go_on, 40),
}


def _check_the_rest(url: str) -> None:
    """The next process goes on there, and afterwards there is nothing that a run without a death has not."""
    backend().clean(url)
    before = _steps(url)
    for step in before:
        assert ckpt.verify(f"{url}/{step}").ok
    with ckpt.Checkpointer(url, max_to_keep=1, asynchronous=False) as checkpointer:
        restored = checkpointer.restore_latest(tree(0))
        if restored is not None:
            assert restored.step == max(before) and restored.state["n"] == before[restored.step]
        assert checkpointer.save(7, tree(7))
    assert _steps(url) == {7: 7}
    ckpt.save(f"{url}-fresh/7", tree(7))
    expected = {_without_token(key) for key in keys_at(f"{url}-fresh").list()} | {".ckpt-owner"}
    left = [key for key in keys_at(url).list() if not key.startswith("committed/")]
    assert {_without_token(key) for key in left} == expected
    assert len(left) == len(expected)


def _without_token(name: str) -> str:
    return re.sub("[0-9a-f]{32}", "-", name)


def _killed_at(mortal: Mortal, root: str, name: str, number: int, applied: bool) -> bool:
    """Whether the scenario has so many requests."""
    scenario, url = SCENARIOS[name], f"{root}/{name.replace(' ', '-')}-{number}-{applied:d}"
    scenario.prepare(mortal, url)
    outcome = mortal.run(name, url, lambda request: request.number == number, applied)
    acknowledged = outcome.reported("acknowledged")
    try:
        scenario.check(url, acknowledged)
        _check_the_rest(url)
    except BaseException as error:
        at = [request.path for request in mortal.proxy.requests if request.number <= number][-1:]
        error.add_note(f"{name}, killed at request {number} ({applied=}): {at}; {outcome}")
        raise
    return outcome.was_killed


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("where", ["on_gs", "on_s3"])
def test_killed_at_every_request(where, name, applied, request):
    mortal, root = request.getfixturevalue(where)
    killed = 0
    for number in itertools.count(1):
        if not _killed_at(mortal, root, name, number, applied):
            break
        killed += 1
        assert killed < MOST_REQUESTS
    assert killed >= SCENARIOS[name].requests
