"""Who reads the coordination service cannot fetch local steps, and strangers hold little memory.

The service answers anybody who reaches the coordinator's port. So nothing that goes through it may be what a request
must carry; only processes that can read a file of the job's user know that.
"""

import contextlib
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._directory import SECRET_FILE, make_secret, read_secret
from ckpt_core._exchange import Connection, Key
from ckpt_core._run.tiers.peers import Peers, exchange_addresses

KEY = Key(3, "token", 1)


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
