"""The server of local steps gives what is on its served, to who knows the secret, and nothing else."""

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._exchange import Connection, Key, Server
from ckpt_core._run.tiers.folders import Target
from ckpt_core._run.tiers.judge import Source
from ckpt_core._run.tiers.peers import Peers, bring, fetch_first, pieces_of_files
from ckpt_core._saved.checkpoint import NativeCheckpoint
from ckpt_core._saved.opening import open_checkpoint

SECRET = "s" * 64
KEY = Key(3, "token", 1)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    """A server that offers two files, beside one that it does not."""
    part = tmp_path / "part"
    part.mkdir()
    (part / "ckpt.json").write_bytes(b"record")
    (part / "data").write_bytes(bytes(range(256)) * 5000)
    (part / "secret").write_bytes(b"not listed")
    os.symlink("/etc/hostname", part / "link")
    os.mkfifo(part / "pipe")
    (part / "folder").mkdir()
    names = ("ckpt.json", "data", "link", "gone", "pipe", "folder")
    offered = [str(part / name) for name in names]
    server = Server("127.0.0.1", SECRET, lambda key: offered if key == KEY else None)
    try:
        yield server, part
    finally:
        server.close()


def fetched(server: Server, position: Any, key: Key = KEY, secret: str = SECRET) -> bytes:
    connection = Connection("127.0.0.1", server.port, secret)
    try:
        return b"".join(connection.pieces(key, position))
    finally:
        connection.close()


def test_what_is_offered_comes_whole(served):
    server, part = served
    assert fetched(server, 0) == b"record"
    assert fetched(server, 1) == (part / "data").read_bytes()


@pytest.mark.parametrize("secret", ["", "S" * 64, SECRET + "s", SECRET[:-1], "\xe9"])
def test_a_wrong_secret_is_refused(served, secret):
    with pytest.raises(ConnectionError, match="403 Forbidden"):
        fetched(served[0], 0, secret=secret)


@pytest.mark.parametrize(
    "key", [KEY._replace(step=4), KEY._replace(token="other"), Key(3, "token", 0)]
)
def test_another_part_is_refused(served, key):
    with pytest.raises(ConnectionError, match="404"):
        fetched(served[0], 0, key)


@pytest.mark.parametrize(
    "position", [2, 3, 4, 5, 6, 99999999, "../secret", "secret", "-1", "1/../secret", "done"]
)
def test_another_file_is_refused(served, position):
    """Of a link, a file that is gone, a pipe and a folder; beyond the last; and paths instead of positions."""
    with pytest.raises(ConnectionError, match="404"):
        fetched(served[0], position)


def asked(server: Server, method: str, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Authorization", f"Bearer {SECRET}")
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def test_other_requests_are_refused(served):
    server, part = served
    for path in (
        "/",
        "//etc/passwd",
        f"/{part}/secret",
        "/3/token/1",
        "/3/token/1/0/",
        "/3/token/1/0?x",
    ):
        assert asked(server, "GET", path) == 404, path
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert asked(server, method, "/3/token/1/0") == 501


def test_connections_are_bounded_and_end(served):
    def serving() -> int:
        return sum(thread.name == "ckpt-exchange" for thread in threading.enumerate())

    server, before = served[0], serving()
    held = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(32)]
    try:
        for connection in held:
            request = f"GET /3/token/1/0 HTTP/1.1\r\nAuthorization: Bearer {SECRET}\r\n\r\nGET"
            connection.sendall(request.encode())  # and then nothing
            got = b""
            while not got.endswith(b"record"):
                piece = connection.recv(1000)
                assert piece, got
                got += piece
        deadline = time.monotonic() + 10
        refused = False
        while not refused and time.monotonic() < deadline:
            try:
                fetched(server, 0)
            except ConnectionError:
                refused = True
        assert refused
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 5
        assert serving() == before - 1
    finally:
        for connection in held:
            connection.close()


def test_a_server_that_is_away(tmp_path):
    server = Server("127.0.0.1", SECRET, lambda _: None)
    server.close()
    server.close()
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1"):
        fetched(server, 0)


@pytest.mark.parametrize("answers", [False, True])
def test_a_peer_that_hangs_is_given_up(answers):
    """Before it answers, and in the middle of a file."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = Connection("127.0.0.1", listener.getsockname()[1], SECRET, idle_secs=0.2)
        held: list[socket.socket] = []

        def answer() -> None:
            held.append(listener.accept()[0])
            if answers:
                held[0].sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")

        thread = threading.Thread(target=answer)
        thread.start()
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="timed out"):
            list(connection.pieces(KEY, 0))
        assert time.monotonic() - began < 5
        connection.close()
        thread.join()
        held[0].close()


def test_a_file_that_becomes_shorter_is_noticed(served):
    server, part = served
    with (part / "data").open("r+b") as file:
        file.truncate(256 * 5000 * 40)  # sparse, larger than what sockets hold
    connection = Connection("127.0.0.1", server.port, SECRET)
    pieces = connection.pieces(KEY, 1)
    next(pieces)
    os.truncate(part / "data", 100)
    with pytest.raises(ConnectionError, match=r"before the end|IncompleteRead|reset"):
        for _ in pieces:
            pass
    connection.close()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Key]:
    path = tmp_path / "saved" / "3"
    ckpt.save(path, {"w": jnp.arange(3 << 15), "text": "x"})
    opened = open_checkpoint(path)
    assert isinstance(opened, NativeCheckpoint)
    return path, Key(3, opened.record.token, 0)


def brought(saved: tuple[Path, Key], target: Path, key: Key | None = None) -> None:
    path, own = saved
    opened = open_checkpoint(path)
    assert isinstance(opened, NativeCheckpoint)
    pieces = pieces_of_files([str(path / one) for one in ("ckpt.json", *opened.record.beside)])
    bring(key or own, pieces, Target(str(target), PosixBackend(), True, lambda: None))


def test_what_is_brought_is_equal_to_the_byte(saved, tmp_path):
    target = tmp_path / "here" / "3"
    brought(saved, target)
    files = {file.relative_to(saved[0]) for file in saved[0].rglob("*") if file.is_file()}
    assert files == {file.relative_to(target) for file in target.rglob("*") if file.is_file()}
    assert all((saved[0] / file).read_bytes() == (target / file).read_bytes() for file in files)
    assert ckpt.verify(target).ok


def test_a_damaged_part_is_not_brought(saved, tmp_path):
    """Every file in turn, with one bit that is wrong and with one byte more."""
    target = tmp_path / "here" / "3"
    brought(saved, target)
    names = [file for file in sorted(saved[0].rglob("*")) if file.is_file()]
    assert any("/d/" in str(name) for name in names)
    for file in names:
        whole = file.read_bytes()
        flipped = bytes([*whole[:-1], whole[-1] ^ 1]) if whole else b"x"
        for damaged in (flipped, whole + b"x", whole[:-1]):
            if damaged == whole:
                continue
            file.write_bytes(damaged)
            with pytest.raises((ckpt.CheckpointCorrupt, AssertionError)):
                brought(saved, target)
            file.write_bytes(whole)
        assert ckpt.verify(target).ok  # what was there stays
    assert [path.name for path in target.parent.iterdir()] == ["3"]


def test_another_save_is_not_brought(saved, tmp_path):
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"ckpt\.json: another part"):
        brought(saved, tmp_path / "here" / "3", saved[1]._replace(token="0" * 32))
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("what", "error"),
    [("lacks it", ckpt.CheckpointCorrupt), ("cannot read it", OSError), ("is away", OSError)],
)
def test_a_part_is_damaged_only_where_every_source_lacks_it(tmp_path, what, error):
    """The first source lacks it; of the second nobody knows, unless it says the same."""

    def second(_: Key) -> None:
        if what == "cannot read it":
            raise OSError(5, "Input/output error")

    with (
        contextlib.closing(Server("127.0.0.1", SECRET, lambda _: None)) as first_server,
        contextlib.closing(Server("127.0.0.1", SECRET, second)) as second_server,
    ):
        ports = (first_server.port, 1 if what == "is away" else second_server.port)
        keys = {f"at/{n}/address": json.dumps(["127.0.0.1", port]) for n, port in enumerate(ports)}
        here: Any = SimpleNamespace(index=2, get=keys.get)
        peers = Peers(here, lambda _: None, SECRET, None, "at", 5.0)
        target = Target(str(tmp_path / "here" / "3"), PosixBackend(), False, lambda: None)
        with pytest.raises(error, match=r"from process 0: .*404.*from process 1: ") as caught:
            fetch_first((3, "token"), [Source(0, 0), Source(1, 1)], peers, target, "it")
    assert not isinstance(caught.value, ConnectionError)  # one more agreement is to follow
