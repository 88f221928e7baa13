"""A server of Google Cloud Storage's JSON API, of one process, that keeps its objects in memory.

It honours ``ifGenerationMatch`` and ``ifGenerationNotMatch``, ranges and pages of listings, which TensorStore
uses, and what gcsfs and google-cloud-storage need besides: metadata of a bucket and of an object, folders in
listings, and uploads in parts. https://cloud.google.com/storage/docs/json_api has the protocol. Requests are noted,
and ``fault`` may answer them in the server's place.
"""

import contextlib
import json
import re
import secrets
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PAGE = 1000


@dataclass(frozen=True)
class Request:
    """One request: ``kind`` is get, put, list or delete; ``name`` of the object, or prefix or first name of a listing."""

    kind: str
    bucket: str
    name: str


@dataclass
class Server:
    """The objects by name, each with its generation, and the requests so far."""

    url: str = ""
    bucket: str = field(default_factory=lambda: f"bucket-{secrets.token_hex(4)}")
    """The only one; no two servers have the same, as TensorStore keeps what it has opened."""
    objects: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    fault: Callable[[Request], int | None] = lambda _: None
    """Gives an HTTP status to answer with, or None."""
    refusal: bytes = b'{"error": {"message": "as the test wants it"}}'
    """The body of such an answer."""
    lost: Callable[[Request], int | None] = lambda _: None
    """As ``fault``, of a put or a deletion that was carried out: its answer is lost."""
    ignores_conditions: bool = False
    projects: set[str | None] = field(default_factory=set)
    """Projects that paid; None for the owner of the bucket."""
    read_bytes: int = 0
    """How much of objects' content was read so far."""
    generation: int = 0
    uploads: dict[str, tuple[str, bytearray]] = field(default_factory=dict)
    """Name and bytes so far of what is being uploaded in parts."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def root(self) -> str:
        return f"gs://{self.bucket}"

    def names(self) -> list[str]:
        return sorted(self.objects)


class QuickHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # head and body in one packet: else each answer waits 40 ms for an acknowledgement
    wbufsize = -1

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_expect_100(self) -> bool:
        met = super().handle_expect_100()
        self.wfile.flush()  # else curl waits a second before it sends a large body
        return met


class _Handler(QuickHandler):
    state: Server

    def do_GET(self) -> None:
        bucket, name, query = self._parsed("/storage/v1/b/")
        if name is None:
            return self._list(bucket, query) if self._of_objects() else self._show(bucket)
        if self._stopped(Request("get", bucket, name)):
            return None
        found = self.state.objects.get(name)
        if found is None:
            return self._send(404)
        generation, data = found
        if query.get("alt") != "media":
            return self._tell(_resource(name, generation, data))
        if not self._met(query, generation):
            return self._send(412 if "ifGenerationMatch" in query else 304)
        status, headers = 200, {"x-goog-generation": str(generation)}
        if "Range" in self.headers:
            start, _, stop = self.headers["Range"].removeprefix("bytes=").partition("-")
            first = int(start) if start else max(0, len(data) - int(stop))
            last = min(int(stop) if start and stop else len(data) - 1, len(data) - 1)
            if first > last:
                return self._send(416)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        with self.state.lock:
            self.state.read_bytes += len(data)
        return self._send(status, data, headers)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        bucket, _, query = self._parsed("/upload/storage/v1/b/")
        kind = query.get("uploadType")
        if kind == "multipart":
            name, data = _parts(data, self.headers["Content-Type"])
        else:
            name = query["name"]
        if kind == "resumable":
            return self._receive(bucket, name, query, data)
        return self._keep(bucket, name, query, data)

    def do_PUT(self) -> None:
        return self.do_POST()  # google-cloud-storage sends the parts so

    def _receive(self, bucket: str, name: str, query: dict[str, str], data: bytes) -> None:
        """Begins an upload in parts, or takes one of them; the last one makes the object."""
        if "upload_id" not in query:
            upload = secrets.token_hex(8)
            self.state.uploads[upload] = name, bytearray()
            where = f"http://{self.headers['Host']}{self.path}&upload_id={upload}"
            return self._send(200, headers={"Location": where})
        whole = self.state.uploads[query["upload_id"]][1]
        whole += data
        if self.headers["Content-Range"].endswith(f"/{len(whole)}"):
            del self.state.uploads[query["upload_id"]]
            return self._keep(bucket, name, query, bytes(whole))
        return self._send(308, headers={"Range": f"bytes=0-{len(whole) - 1}"})

    def _keep(self, bucket: str, name: str, query: dict[str, str], data: bytes) -> None:
        """Makes the object, on the conditions of the query."""
        request = Request("put", bucket, name)
        if self._stopped(request):
            return None
        with self.state.lock:
            generation = self.state.objects.get(name, (0, b""))[0]
            met = self._met(query, generation)
            if met:
                self.state.generation += 1
                generation = self.state.generation
                self.state.objects[name] = generation, data
        if (status := self.state.lost(request)) is not None:
            return self._send(status)
        return self._tell(_resource(name, generation, data)) if met else self._send(412)

    def do_DELETE(self) -> None:
        bucket, name, query = self._parsed("/storage/v1/b/")
        assert name is not None
        request = Request("delete", bucket, name)
        if self._stopped(request):
            return None
        with self.state.lock:
            found = self.state.objects.get(name)
            if found is None:
                return self._send(404)
            if not self._met(query, found[0]):
                return self._send(412)
            del self.state.objects[name]
        return self._send(self.state.lost(request) or 204)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        if self._stopped(
            Request("list", bucket, query.get("prefix", query.get("startOffset", "")))
        ):
            return
        start, end = query.get("startOffset", ""), query.get("endOffset")
        names = [
            name
            for name in self.state.names()
            if name >= start
            and (not end or name < end)
            and name.startswith(query.get("prefix", ""))
            and name > query.get("pageToken", "")
        ]
        answer: dict[str, Any] = {"kind": "storage#objects"}
        if len(names) > _PAGE:
            answer["nextPageToken"] = names[_PAGE - 1]
            names = names[:_PAGE]
        if delimiter := query.get("delimiter"):
            names, answer["prefixes"] = _folders(names, query.get("prefix", ""), delimiter)
        answer["items"] = [_resource(name, *self.state.objects[name]) for name in names]
        self._tell(answer)

    def _show(self, bucket: str) -> None:
        """The bucket's own metadata: it has no real folders."""
        if not self._stopped(Request("list", bucket, "")):
            self._tell({"kind": "storage#bucket", "id": bucket, "name": bucket})

    def _of_objects(self) -> bool:
        return self.path.partition("?")[0].endswith("/o")

    def _parsed(self, root: str) -> tuple[str, str | None, dict[str, str]]:
        """Bucket, name of the object (None for all), and the query."""
        path, _, query = self.path.removeprefix("/download").partition("?")
        bucket, _, rest = path.removeprefix(root).partition("/o")
        values = urllib.parse.parse_qs(query, keep_blank_values=True)
        name = urllib.parse.unquote(rest[1:]) if rest else None
        self.state.projects.add(values.get("userProject", [None])[0])
        return bucket, name, {key: value[-1] for key, value in values.items()}

    def _met(self, query: dict[str, str], generation: int) -> bool:
        if self.state.ignores_conditions:
            return True
        wanted, other = query.get("ifGenerationMatch"), query.get("ifGenerationNotMatch")
        return (wanted is None or int(wanted) == generation) and (
            other is None or int(other) != generation
        )

    def _stopped(self, request: Request) -> bool:
        with self.state.lock:
            self.state.requests.append(request)
        status = self.state.fault(request)
        if status is None and request.bucket != self.state.bucket:
            status = 404
        if status is None:
            return False
        self._send(status, self.state.refusal)
        return True

    def _tell(self, answer: dict[str, Any]) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if data:
            self.wfile.write(data)


def _resource(name: str, generation: int, data: bytes) -> dict[str, Any]:
    known = {"name": name, "generation": str(generation), "size": str(len(data))}
    return {"kind": "storage#object", **known}


def _parts(body: bytes, content_type: str) -> tuple[str, bytes]:
    """Name and bytes of an upload whose one body has the metadata and the data."""
    mark = content_type.partition("boundary=")[2].strip("\"'").encode()
    _, head, rest = body.split(b"--" + mark, 2)
    split = re.search(rb"\r?\n\r?\n", rest)
    assert split is not None
    data = rest[split.end() : rest.rindex(b"--" + mark)].removesuffix(b"\n").removesuffix(b"\r")
    return json.loads(head[head.index(b"{") :])["name"], data


def _folders(names: list[str], prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
    """The names right below the prefix, and the folders there."""
    found: set[str] = set()
    own = [name for name in names if delimiter not in name[len(prefix) :]]
    for name in set(names).difference(own):
        found.add(prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter)
    return own, sorted(found)


class QuickServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # else a burst of connections is refused

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that hung up
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a server on a free port of 127.0.0.1, ended with the block."""
    http = QuickServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join(10)
        http.server_close()


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """A server with one bucket, ended with the block."""
    state = Server()
    with serving(type("Handler", (_Handler,), {"state": state})) as state.url:
        yield state
