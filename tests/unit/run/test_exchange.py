"""The server of local steps gives what is on its list, to who knows the secret, and nothing else; the coordination service sees no secret."""

import contextlib
import http.client
import json
import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import SECRET_FILE, PosixBackend, make_secret, read_secret
from ckpt_core._exchange import Connection, Key, Server
from ckpt_core._run.tiers.folders import Target
from ckpt_core._run.tiers.judge import Source
from ckpt_core._run.tiers.peers import (
    Peers,
    bring,
    exchange_addresses,
    fetch_first,
    pieces_of_files,
)
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


class _Meeting:
    """Agreements of threads that stand for processes; keeps all that a service would have seen."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen: list[str] = []
        self._barrier = threading.Barrier(count)
        self._texts: list[str] = [""] * count
        self._answer = ""
        self.keys: dict[str, str] = {}

    def of(self, index: int) -> Any:
        return _Process(self, index)

    def gather(self, index: int, mine: str, decide: Callable[[list[str]], str]) -> str:
        self._texts[index] = mine
        self._barrier.wait(10)
        if index == 0:
            self._answer = decide(list(self._texts))
            self.seen += [*self._texts, self._answer]
        self._barrier.wait(10)
        answer = self._answer
        self._barrier.wait(10)
        return answer


class _Process:
    def __init__(self, meeting: _Meeting, index: int) -> None:
        self._meeting, self.index, self.count = meeting, index, meeting.count

    def round(self, call: str, timeout_secs: float) -> "_Process":
        return self

    def decide(self, mine: str, judge: Any) -> str:
        return self._meeting.gather(self.index, mine, judge)

    def put(self, name: str, text: str) -> None:
        self._meeting.seen.append(text)
        self._meeting.keys[name] = text

    def get(self, name: str) -> str | None:
        return self._meeting.keys.get(name)

    def drop(self, name: str) -> None:
        self._meeting.keys.pop(name, None)


def _met(
    count: int, part: Path, options: list[ckpt.Options], directory: str | None = None
) -> tuple[list[Peers], _Meeting]:
    part.mkdir(exist_ok=True)
    (part / "ckpt.json").write_bytes(b"weights")
    offered = [str(part / "ckpt.json")]
    meeting = _Meeting(count)
    if directory is not None:
        make_secret(directory)

    def one(index: int) -> Peers:
        served = {KEY: offered}.get
        return exchange_addresses(meeting.of(index), options[index], served, directory)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count))), meeting


def _fetch(connection: Connection) -> bytes:
    try:
        return b"".join(connection.pieces(KEY, 0))
    finally:
        connection.close()


def _what_the_service_saw(seen: list[str]) -> set[str]:
    """Every text in the messages, and every piece of one that could be a secret."""
    found = set[str](seen)
    for text in seen:
        found.update(re.findall(r"[0-9a-zA-Z]{8,}", text))
        found.update(re.split(r"[\s!?=]", text))
        for said in (text, text[1:], text[12:]):  # alone, after a mark, after a digest
            with contextlib.suppress(ValueError):
                found.update(str(part) for part in json.loads(said) if not isinstance(part, list))
    return found


@pytest.mark.parametrize("how", ["option", "directory"])
def test_who_reads_the_service_cannot_fetch(tmp_path, how):
    options, directory = ckpt.Options(), str(tmp_path)
    if how == "option":
        secret = tmp_path / "secret"
        secret.write_bytes(os.urandom(32))
        secret.chmod(0o600)
        options, directory = ckpt.Options(peer_secret_file=str(secret)), ""
    peers, meeting = _met(3, tmp_path / "part", [options] * 3, directory or None)
    try:
        for one in peers:
            for index in range(3):
                assert _fetch(one.connect(index)) == b"weights"
        private = (tmp_path / ("secret" if how == "option" else SECRET_FILE)).read_bytes()
        for said in _what_the_service_saw(meeting.seen):
            assert private.hex() not in said and peers[0].secret not in said
            if said.isascii() and said.isprintable():
                with pytest.raises(ConnectionError, match="403 Forbidden"):
                    _fetch(Connection(*peers[0].find(1), said))
    finally:
        for one in peers:
            one.close()


def test_without_a_file_the_log_says_what_is_open(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "ckpt_core"):
        peers, _ = _met(2, tmp_path / "part", [ckpt.Options()] * 2)
    for one in peers:
        one.close()
    (record,) = [entry for entry in caplog.records if "peer_secret_file" in entry.getMessage()]
    assert "whoever reaches the coordinator's port" in record.getMessage()


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_secret_that_others_can_read_is_refused_everywhere(tmp_path, mode):
    good, bad = tmp_path / "good", tmp_path / "bad"
    for file in (good, bad):
        file.write_bytes(b"s" * 32)
        file.chmod(0o600)
    bad.chmod(mode)
    options = [ckpt.Options(peer_secret_file=str(file)) for file in (good, bad)]
    with pytest.raises(ckpt.CheckpointError, match=rf"process 1 has no secret: .*chmod 600 {bad}"):
        _met(2, tmp_path / "part", options)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda file: file.write_bytes(b"short"), "has 5 bytes"),
        (lambda file: None, "No such file"),
        (lambda file: file.mkdir(), "no regular file"),
        (lambda file: file.symlink_to("/etc/hostname"), "symbolic links|cannot"),
    ],
    ids=["short", "missing", "folder", "link"],
)
def test_what_is_no_secret_is_refused(tmp_path, make, told):
    file = tmp_path / "file"
    make(file)
    if file.is_file() and not file.is_symlink():
        file.chmod(0o600)
    with pytest.raises(ckpt.CheckpointError, match=told):
        _met(2, tmp_path / "part", [ckpt.Options(peer_secret_file=str(file))] * 2)


def test_different_secrets_are_told(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(os.urandom(32))
        file.chmod(0o600)
    options = [ckpt.Options(peer_secret_file=str(file)) for file in files]
    with pytest.raises(ckpt.CheckpointError, match="the same bytes on each host"):
        _met(2, tmp_path / "part", options)
    with pytest.raises(ckpt.CheckpointError, match="has no secret"):
        _met(2, tmp_path / "part", [options[0], ckpt.Options()])


def test_the_secret_of_a_directory_is_made_once_and_is_private(tmp_path):
    before = os.umask(0)
    try:
        with ThreadPoolExecutor(8) as pool:
            paths = set(pool.map(lambda _: make_secret(str(tmp_path)), range(32)))
    finally:
        os.umask(before)
    (path,) = paths
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert len(read_secret(path)) == 32 and os.listdir(tmp_path) == [SECRET_FILE]
