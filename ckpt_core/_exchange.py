"""Files of local checkpoints from one process to another: HTTP on the job's own network.

The only module that opens sockets. Nothing is pushed: the process that needs files fetches them. A request names a part
of a step and the number of a file in it, ``/<step>/<token>/<writer>/<n>``. A server gives what its ``ServedParts`` lists,
to who knows the secret of the job: paths come from there alone, so no request reaches another file.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import http.client
import io
import ipaddress
import os
import re
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple, cast

from ckpt_core._options import MIB
from ckpt_core._platform import NO_LINK, READ

BLOCK_BYTES = 4 * MIB
IDLE_SECS = 30.0  # maximum time in which a connection moves no byte, on either side
_MOST_REASON = 100  # maximum length of what is repeated of a refusal
_MOST_CONNECTIONS = 32  # further ones are refused, and their processes try another source, or later
_PATH = re.compile(r"/(\d{1,19})/([0-9A-Za-z]{1,64})/(\d{1,8})/(\d{1,8})")
_NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL})
"""Errors of ``open_plain`` that say that a file is not there, or is none; others, that it cannot be read now."""
_POLL_SECS = 0.5
_LOOPBACK = "127.0.0.1"
_DISCARD_PORT = 9


def route_to(host: str) -> str | None:
    """This process's address on the network to ``host``; None if unknown. A connected UDP socket sends nothing."""
    with contextlib.suppress(OSError, UnicodeError, IndexError):
        found = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return None


def far_route(everyone: Sequence[tuple[str, str | None]]) -> str | None:
    """On process 0: the first route that is not loopback, else empty; None if all processes are in one network namespace."""
    if len({network for network, _ in everyone}) == 1:
        return None
    return next((one for _, one in everyone if one and not _is_loopback(one)), "")


def choose_address(mine: str | None, far: str | None) -> str | None:
    """The address at which a process listens; None if no other could reach it. In one network namespace that is loopback,
    else ``mine``, the route to the coordinator; on the coordinator's own host, the route to a process elsewhere.
    """
    if far is None:
        return _LOOPBACK
    if mine is not None and not _is_loopback(mine):
        return mine
    return route_to(far) if far else None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class Key(NamedTuple):
    """Identifies a part of a step: one that its writer wrote, or that is as good as that."""

    step: int
    token: str  # of the save
    writer: int  # index of the process that wrote the part


class Lacking(ConnectionError):
    """The peer was reached, and does not have the part: asked once more, it would say so again."""


class Connection:
    """A connection to a peer, to fetch one file after the other. It fails if no byte comes for ``idle_secs``."""

    def __init__(self, address: str, port: int, secret: str, idle_secs: float = IDLE_SECS) -> None:
        self._used = time.monotonic()
        self._where = f"{address}:{port}"
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._http = http.client.HTTPConnection(address, port, timeout=idle_secs)

    def pieces(self, key: Key, position: int) -> Iterator[bytes]:
        """The content of one file, in blocks; Lacking if the peer has none, ConnectionError if it does not give all."""
        step, token, writer = key
        try:
            if time.monotonic() - self._used > IDLE_SECS / 2:
                self._http.close()  # what came was being written: the peer may have hung up meanwhile
            self._http.request("GET", f"/{step}/{token}/{writer}/{position}", headers=self._headers)
            answer = self._http.getresponse()
            if answer.status != HTTPStatus.OK:
                answer.close()  # whatever else it says
                self._http.close()
                text = (
                    f"{self._where} refused file {position} of the part of process {writer} of step {step}: "
                    f"{answer.status} {ascii(answer.reason[:_MOST_REASON])[1:-1]}"
                )
                lacks = answer.status == HTTPStatus.NOT_FOUND
                raise Lacking(text) if lacks else ConnectionError(text)
            missing = answer.length or 0
            while missing:
                data = answer.read(min(BLOCK_BYTES, missing))
                if not data:
                    what = f"stopped {missing} bytes before the end of a file"
                    raise ConnectionError(f"{self._where} {what}")
                missing -= len(data)
                self._used = time.monotonic()
                yield data
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, ConnectionError) and str(error).startswith(self._where):
                raise
            raise ConnectionError(f"{self._where}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._http.close()


def open_plain(path: str) -> io.FileIO:
    """Opens a regular file for reading, neither following a link nor waiting at a pipe; OSError for anything else."""
    descriptor = os.open(path, READ | NO_LINK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return io.FileIO(descriptor)
    os.close(descriptor)
    raise OSError(errno.EINVAL, "no regular file", path)


ServedParts = Callable[[Key], Sequence[str] | None]
"""The paths of the files of a part: a request names one by its position. None if this process does not have the part,
OSError if it cannot tell. Called from any thread.
"""


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves parts to requests with the secret until ``close``, in daemon threads, at a free ``port`` of an IP address."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = _MOST_CONNECTIONS

    def __init__(self, address: str, secret: str, served: ServedParts) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.authorized = f"Bearer {secret}".encode()
        self.served = served
        self._last_used = time.monotonic()
        self._open = set[Any]()  # connections
        self._lock = threading.Lock()
        super().__init__((address, 0), _Handler)
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_SECS,), name="ckpt-exchange", daemon=True
        )
        self._thread.start()

    @property
    def last_used(self) -> float:
        """When somebody was last connected, by the monotonic clock."""
        with self._lock:
            return time.monotonic() if self._open else self._last_used

    def close(self) -> None:
        """Ends all transfers and closes the port; may be called again."""
        _wake(self.socket)  # else serve_forever would look at the end only after its poll
        self.shutdown()
        self.server_close()
        with self._lock:
            for connection in self._open:
                _wake(connection)
        self._thread.join(2 * IDLE_SECS)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                return False
            self._open.add(request)
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            if request in self._open:
                self._open.remove(request)
                self._last_used = time.monotonic()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error here; the default prints a traceback."""


def _wake(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ckpt", ""
    timeout = IDLE_SECS
    # head and body of an answer are two writes: the second would wait for what acknowledges the first, 40 ms
    disable_nagle_algorithm = True
    _found: tuple[Key, Sequence[str] | None] | None = None  # the part that was asked for last

    def do_GET(self) -> None:
        """Answers one request."""
        server = cast(Server, self.server)
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, server.authorized):
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        asked = _PATH.fullmatch(self.path)
        if asked is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        key = Key(int(asked[1]), asked[2], int(asked[3]))
        try:
            if self._found is None or self._found[0] != key:
                self._found = key, server.served(key)
            paths = self._found[1] or ()
            if int(asked[4]) >= len(paths):
                raise FileNotFoundError(errno.ENOENT, "no such file of a part")
            file = open_plain(paths[int(asked[4])])
        except OSError as error:
            if error.errno in _NO_FILE:  # deleted in the meantime, as a rule
                self._refuse(HTTPStatus.NOT_FOUND)
            else:  # a file that its disk does not give says nothing about the part
                why = f"It cannot read it: {error.strerror}"
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, why)
            return
        with file:
            size_bytes = os.fstat(file.fileno()).st_size
            self._answer(HTTPStatus.OK, size_bytes)
            if size_bytes and self.connection.sendfile(file, 0, size_bytes) < size_bytes:
                # it became shorter: the receiver sees that bytes are missing
                self.close_connection = True

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
