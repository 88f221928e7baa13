"""A part that a process lacks is asked of each of its sources, and is damaged only where all of them lack it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._exchange import Key, Server
from ckpt_core._run.tiers.folders import Target
from ckpt_core._run.tiers.judge import Source
from ckpt_core._run.tiers.peers import Peers, fetch_first
from tests.support.counted_service import Keys

SECRET = "s" * 64
TOKEN = "t" * 32
STEP = 3


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Callable[..., Peers]]:
    """Peers of a process that fetches from servers with these shelves; 0 is the one that fetches."""
    servers: list[Server] = []

    def begin(shelves: list[Any]) -> Peers:
        keys = Keys()
        for number, served in enumerate(shelves, 1):
            servers.append(Server("127.0.0.1", SECRET, served))
            keys.put(f"at/{number}/address", json.dumps(["127.0.0.1", servers[-1].port]))
        here: Any = type("Here", (), {"index": 0, "count": 1 + len(shelves), "get": keys.get})()
        return Peers(here, lambda _: None, SECRET, None, "at", 5.0)

    yield begin
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    ("what", "error"),
    [("lacks it", ckpt.CheckpointCorrupt), ("cannot read it", OSError), ("is away", OSError)],
)
def test_a_part_that_a_source_may_have_is_not_damaged(tmp_path, sources, what, error):
    """One source lacks it; of the other nobody knows, unless it says the same."""

    def second(_: Key) -> None:
        if what == "cannot read it":
            raise OSError(5, "Input/output error")

    peers = sources([lambda _: None, second])
    if what == "is away":
        peers.find(2)
        peers._found[2] = peers._found[2][0], 1
    target = Target(str(tmp_path / "here" / "3"), PosixBackend(), False, lambda: None)
    with pytest.raises(error, match=r"from process 1: .*404.*from process 2: ") as caught:
        fetch_first((STEP, TOKEN), [Source(1, 1), Source(2, 2)], peers, target, "it")
    if what == "cannot read it":
        assert caught.match("500 It cannot read it: Input/output error")
    assert not isinstance(caught.value, ConnectionError)  # one more agreement is to follow
