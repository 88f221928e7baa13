"""Passes HTTP requests on to a server, and counts them and their bytes.

``/counts`` below its URL answers with what came since the last time.
"""

import collections
import http.client
import json
import threading
import urllib.parse
import urllib.request
from contextlib import AbstractContextManager
from typing import ClassVar

from tests.support.gcs_server import QuickHandler, serving

_BETWEEN_TWO = {"connection", "keep-alive", "transfer-encoding", "expect"}
"""Headers that one connection is told of, not the request."""
_PAUSE_SECS = 120.0


class _Handler(QuickHandler):
    host = ""
    counts: ClassVar[collections.Counter[str]] = collections.Counter()
    lock: ClassVar[threading.Lock] = threading.Lock()

    def setup(self) -> None:
        super().setup()
        self.onward = http.client.HTTPConnection(self.host, timeout=_PAUSE_SECS)

    def finish(self) -> None:
        self.onward.close()
        super().finish()

    def do_GET(self) -> None:
        if self.path == "/counts":
            with self.lock:
                told = json.dumps(self.counts).encode()
                self.counts.clear()
            return self._answer(200, {}, told)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kept = {k: v for k, v in self.headers.items() if k.lower() not in _BETWEEN_TWO}
        self.onward.request(self.command, self.path, body, kept)
        found = self.onward.getresponse()
        data = found.read()
        with self.lock:
            self.counts.update({self.command: 1, "up": len(body), "down": len(data)})
        headers = {k: v for k, v in found.getheaders() if k.lower() not in _BETWEEN_TWO}
        return self._answer(found.status, headers, data)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204 and "content-length" not in map(str.lower, headers):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def counted(proxy_url: str) -> dict[str, int]:
    """Requests by method, and bytes ``up`` and ``down``, since the last time."""
    with urllib.request.urlopen(f"{proxy_url}/counts", timeout=60) as answer:
        return json.load(answer)


def running(url: str) -> AbstractContextManager[str]:
    """The URL of a proxy of the server at ``url``, ended with the block."""
    return serving(type("Handler", (_Handler,), {"host": urllib.parse.urlsplit(url).netloc}))
