"""Gives the files of this process's local steps to the other processes of the job.

A request names a part of a step and the number of a file in it: ``/<step>/<token>/<writer>/<n>``;
with ``done`` instead, the process that makes copies of the part says that it has ended.
Path and file names come from ``ServedParts`` alone, so no request can reach another file.
"""

from __future__ import annotations

import collections
import errno
import hmac
import io
import os
import re
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple, cast

from ckpt_core._exchange.client import IDLE_SECS, authorization
from ckpt_core._platform import NO_LINK, READ

_MOST_CONNECTIONS = 32
"""Further ones are refused, and their processes try another source, or later."""
_PATH = re.compile(r"/(\d{1,19})/([0-9A-Za-z]{1,64})/(\d{1,8})/(\d{1,8}|done)")
_NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL})
"""Errors of ``open_plain`` that say that a file is not there, or is none; others, that it cannot be read now."""
_POLL_SECS = 0.5
_REMEMBERED = 16


class Key(NamedTuple):
    """Identifies a part of a step: one that its writer wrote, or that is as good as that."""

    step: int
    token: str  # of the save
    writer: int  # index of the process that wrote the part


@dataclass(frozen=True)
class Offered:
    """The files of one part; a request names one by its position in ``names``."""

    path: str
    names: tuple[str, ...]  # relative to ``path``


def open_plain(path: str) -> io.FileIO:
    """Opens a file for reading; neither follows a link nor waits at a pipe. Raises OSError for anything but a regular
    file.
    """
    descriptor = os.open(path, READ | NO_LINK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return io.FileIO(descriptor)
    os.close(descriptor)
    raise OSError(errno.EINVAL, "no regular file", path)


ServedParts = Callable[[Key], Offered | None]
"""Looks a part up; None if this process does not have it, OSError if it cannot tell. Called from any thread."""


class Server:
    """Serves parts until ``close``, in daemon threads, at a free ``port`` of an IP address. Every request must carry
    the secret.
    """

    def __init__(self, address: str, secret: str, served: ServedParts) -> None:
        self._listener = _Listener(address, authorization(secret), served)
        self.port: int = self._listener.server_address[1]
        self._thread = threading.Thread(
            target=self._listener.serve_forever,
            args=(_POLL_SECS,),
            name="ckpt-exchange",
            daemon=True,
        )
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread for it
            self._listener.server_close()
            raise

    @property
    def last_used(self) -> float:
        """When, by the monotonic clock, a process of the job was last connected: now, if one is. One that moves no
        byte is cut off after ``IDLE_SECS``.
        """
        return time.monotonic() if self._listener.in_use else self._listener.last_used

    def was_done(self, key: Key) -> bool:
        """Whether a process said that it needs a part no longer; of a few recent parts."""
        return key in self._listener.done

    def close(self) -> None:
        """Ends all transfers and closes the port; may be called again."""
        self._listener.end()
        self._thread.join(2 * IDLE_SECS)


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = _MOST_CONNECTIONS

    def __init__(self, address: str, authorized: str, served: ServedParts) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.authorized = authorized.encode()
        self.served = served
        self.last_used = time.monotonic()
        self.done: collections.deque[Key] = collections.deque(maxlen=_REMEMBERED)
        self._open = set[Any]()
        self.in_use: set[Any] = set()  # those that showed the secret
        self._lock = threading.Lock()
        self._ended = False
        super().__init__((address, 0), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if self._ended or len(self._open) >= _MOST_CONNECTIONS:
                return False
            self._open.add(request)
        return True

    def use(self, request: Any) -> None:
        """Notes that a connection is one of the job."""
        with self._lock:
            self.in_use.add(request)
            self.last_used = time.monotonic()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
            if request in self.in_use:
                self.in_use.discard(request)
                self.last_used = time.monotonic()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error here; the default prints a traceback."""

    def end(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            for connection in self._open:
                _wake(connection)
        _wake(self.socket)  # else serve_forever would look at the end only after its poll
        self.shutdown()
        self.server_close()


def _wake(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is closed already


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ckpt", ""
    timeout = IDLE_SECS
    # head and body of an answer are two writes: the second would wait for what acknowledges the first, 40 ms
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._key: Key | None = None
        self._offered: Offered | None = None

    def do_GET(self) -> None:
        """Answers one request."""
        listener = cast(_Listener, self.server)
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, listener.authorized):
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        listener.use(self.connection)
        asked = _PATH.fullmatch(self.path)
        if asked is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        key = Key(int(asked[1]), asked[2], int(asked[3]))
        if asked[4] == "done":
            listener.done.append(key)
            self._answer(HTTPStatus.OK, 0)
            return
        position = int(asked[4])
        if key != self._key:
            try:
                found = listener.served(key)
            except OSError as error:
                self._refuse_unread(error)
                return
            self._key, self._offered = key, found
        if self._offered is None or position >= len(self._offered.names):
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        path = os.path.join(self._offered.path, self._offered.names[position])
        try:
            file = open_plain(path)
        except OSError as error:  # deleted in the meantime, as a rule
            self._refuse_unread(error)
            return
        with file:
            self._send(file)

    def _send(self, file: Any) -> None:
        size_bytes = os.fstat(file.fileno()).st_size
        self._answer(HTTPStatus.OK, size_bytes)
        sent = 0
        while sent < size_bytes:
            count = self.connection.sendfile(file, sent, min(_SEND_BYTES, size_bytes - sent))
            if count == 0:  # the file became shorter: the receiver sees that bytes are missing
                self.close_connection = True
                return
            sent += count

    def _refuse_unread(self, error: OSError) -> None:
        """Tells a file that is not there from one that its disk does not give, which says nothing about the part."""
        if error.errno in _NO_FILE:
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"It cannot read it: {error.strerror}")

    def _refuse(self, status: HTTPStatus, reason: str | None = None) -> None:
        self.close_connection = True
        self._answer(status, 0, reason)

    def _answer(self, status: HTTPStatus, size_bytes: int, reason: str | None = None) -> None:
        self.send_response(status, reason)
        self.send_header("Content-Length", str(size_bytes))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """The default writes a line to stderr for every request."""


_SEND_BYTES = 8 * 1024 * 1024
