"""A proxy in front of an object store that counts requests and spoils some of them, as a rule says.

It sits between ckpt and a server on this machine. Requests go on as they are, the name of the host included, which
S3's signatures cover. ``python -m tests.support.fault_proxy URL`` spoils none, prints its own URL, and ends when its
input ends; ``counted`` asks it for what came.
"""

import contextlib
import http.client
import json
import socket
import struct
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from tests.support.gcs_server import QuickHandler, QuickServer

Fault = int | tuple[int, bytes] | Literal["reset", "truncate", "flip", "stall", "lost"]
"""What becomes of one request:

* a number, or a pair: the proxy answers with this HTTP status, and body, and does not ask the server
* ``reset``: the connection is reset before the server is asked
* ``truncate``: half of the body comes, then the end of the connection
* ``flip``: one bit in the middle of the body of a successful answer is another one
* ``stall``: nothing comes until ``Proxy.ended`` is set, or the client has gone
* ``lost``: the server carries the request out, and the connection is reset
"""


@dataclass(frozen=True)
class Request:
    """One request; ``number`` counts from 1. ``key`` is None for a listing, or one of the bucket itself."""

    number: int
    method: str
    path: str
    key: str | None


@dataclass
class Proxy:
    """What came so far, and what is to be done with the next request."""

    upstream: str
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter[str])
    """Requests by method, and bytes of bodies ``up`` and ``down``, since somebody asked."""
    rule: Callable[[Request], Fault | None] = lambda _: None
    applied: Callable[[Request], None] = lambda _: None
    """Called when the server has answered, and the client does not know it yet."""
    ended: threading.Event = field(default_factory=threading.Event)
    struck: list[tuple[Request, Fault]] = field(default_factory=list)
    at_work: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        """Forgets what came, and spoils nothing any more."""
        self.rule, self.applied = lambda _: None, lambda _: None
        with self.lock:
            self.requests.clear()
            self.struck.clear()

    def drain(self, timeout_secs: float = 20.0) -> None:
        """Blocks until the server has answered everything that was sent on."""
        deadline = time.monotonic() + timeout_secs
        while self.at_work:
            assert time.monotonic() < deadline, self.requests[-3:]
            time.sleep(0.005)


def _key(path: str) -> str | None:
    """The object's name in a path of S3 (``/bucket/key``), or of Google's (``/storage/v1/b/bucket/o/key``)."""
    name, _, query = path.partition("?")
    values = urllib.parse.parse_qs(query)
    if name.startswith("/upload/"):
        return values["name"][0]
    parts = name.split("/", 6 if name.startswith("/storage/v1/b/") else 2)
    last = 6 if name.startswith("/storage/v1/b/") else 2
    return urllib.parse.unquote(parts[last]) if len(parts) > last and parts[last] else None


_COUNTS = "/counts"


class _Handler(QuickHandler):
    proxy: Proxy
    _server: http.client.HTTPConnection | None = None

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            super().handle()

    def finish(self) -> None:
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        proxy = self.proxy
        if self.path == _COUNTS:
            told = json.dumps(proxy.counts).encode()
            proxy.counts.clear()
            return self._answer(200, [], told)
        with proxy.lock:
            number = len(proxy.requests) + 1
            request = Request(number, self.command, self.path, _key(self.path))
            proxy.requests.append(request)
            proxy.at_work += 1
        try:
            fault = proxy.rule(request)
            if fault is not None:
                with proxy.lock:
                    proxy.struck.append((request, fault))
            if isinstance(fault, int | tuple):
                status, data = (fault, b"") if isinstance(fault, int) else fault
                return self._answer(status, [("Content-Type", "application/xml")], data)
            if fault in ("reset", "stall"):
                return self._hang() if fault == "stall" else self._cut()
            status, headers, data = self._ask(body)
            with proxy.lock:
                proxy.counts.update({self.command: 1, "up": len(body), "down": len(data)})
            proxy.applied(request)
        finally:
            with proxy.lock:
                proxy.at_work -= 1
        if fault == "lost":
            return self._cut()
        if fault == "flip" and data and status in (200, 206):
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return self._answer(status, headers, data, cut=fault == "truncate")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """What the server answers; a connection that it has closed meanwhile is opened anew."""
        for fresh in (False, True):
            if self._server is None or fresh:
                host = urllib.parse.urlsplit(self.proxy.upstream).netloc
                self._server = http.client.HTTPConnection(host, timeout=60)
            try:
                self._server.putrequest(self.command, self.path, True, True)
                for name, value in self.headers.items():
                    if name.lower() not in ("expect", "connection", "transfer-encoding"):
                        self._server.putheader(name, value)
                self._server.endheaders(body or None)
                found = self._server.getresponse()
                return found.status, found.getheaders(), found.read()
            except (http.client.HTTPException, ConnectionError):
                self._server.close()
                if fresh:
                    raise
        raise AssertionError

    def _answer(
        self, status: int, headers: list[tuple[str, str]], data: bytes, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        dropped = {"transfer-encoding", "connection"}
        dropped |= {"content-length"} if self.command != "HEAD" else set()
        for name, value in headers:
            if name.lower() not in dropped:
                self.send_header(name, value)
        if self.command != "HEAD" and status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = self.close_connection or cut
        self.wfile.flush()

    def _hang(self) -> None:
        self.connection.settimeout(0.05)
        while not self.proxy.ended.is_set():
            with contextlib.suppress(TimeoutError):
                if not self.connection.recv(1):
                    break
        self.close_connection = True

    def _cut(self) -> None:
        """Resets the connection, rather than ending it."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


@contextlib.contextmanager
def proxied(upstream: str) -> Iterator[Proxy]:
    """A proxy on a free port of 127.0.0.1, in front of the server at a URL; ended with the block."""
    proxy = Proxy(upstream)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    server = QuickServer(("127.0.0.1", 0), handler)
    server.block_on_close = False
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.ended.set()
        server.shutdown()
        thread.join(10)
        server.server_close()


def counted(proxy_url: str) -> dict[str, int]:
    """The counts of a proxy in another process, which begin anew."""
    with urllib.request.urlopen(f"{proxy_url}{_COUNTS}", timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    with proxied(sys.argv[1]) as served:
        print(served.url, flush=True)
        sys.stdin.read()
