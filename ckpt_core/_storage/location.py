"""Where a database or a checkpoint lies, how TensorStore opens it, what its failures stand for, and keys and values of an object store.

TensorStore is imported at first use. It raises a ValueError for nearly everything; its text begins with a status code of
https://abseil.io/docs/cpp/guides/status-codes and ends with what the system or the HTTP server answered.
"""

from __future__ import annotations

import configparser
import contextlib
import errno
import functools
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt_core._directory import Backend, Keys, ObjectStoreBackend, PosixBackend, refuse_path
from ckpt_core._directory.mounted_files import MountedFiles
from ckpt_core._errors import CheckpointCorrupt, CheckpointError
from ckpt_core._fork import HOME, forked
from ckpt_core._lazy import LazyModule
from ckpt_core._options import Options
from ckpt_core._platform import ROOTS

if TYPE_CHECKING:
    import tensorstore as ts
else:
    ts = LazyModule("tensorstore")

StoreContext = Callable[[], Any]
"""Gives TensorStore's context of one load, which is made at the first call: that imports TensorStore, which takes 10 to 50 ms."""

_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")
_CURL_ERROR = re.compile(r"curl_code='\d+'")
_HTTP_STATUS = re.compile(r"http_response_code='(\d+)'")
_CODE = re.compile(r"(?:^|: )([A-Z_]{5,}): ")
_BAD_CREDENTIALS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
"""What S3 answers with status 400, as if the request were malformed."""
_OF_THE_DATA = frozenset({0, 304, 404, 412, 416})
"""HTTP statuses that say something of the object, or none: every other one is the store's refusal."""


def refusal(error: BaseException, doing: str) -> OSError | None:
    """The OSError for a failure of TensorStore, where the system or the store refused; None if the data itself is at fault."""
    text = str(error)
    system = _SYSTEM_ERROR.search(text)
    number = int(system[1]) if system else isinstance(error, OSError) and error.errno
    if number:
        return OSError(number, f"{doing}: {os.strerror(number)} ({error})")
    found = _HTTP_STATUS.search(text)
    status = int(found[1]) if found else 0
    codes = set(_CODE.findall(text[: found.start() if found else None]))
    expired = status == 400 and any(f"<Code>{code}</Code>" in text for code in _BAD_CREDENTIALS)
    expired = expired or "Failed to create credentials provider" in text
    no_answer = not status and _CURL_ERROR.search(text)  # such as a certificate that is not valid
    no_answer = no_answer or codes & {"ABORTED", "UNAVAILABLE", "RESOURCE_EXHAUSTED"}
    if status in (401, 403) or codes & {"PERMISSION_DENIED", "UNAUTHENTICATED"} or expired:
        number = errno.EACCES
        what = "refused access: check that its credentials are there, not expired, and allow this"
    elif status == 404:  # an object that is missing is no failure of a request
        number, what = errno.ENOENT, "has no such bucket: make it first"
    elif "DEADLINE_EXCEEDED" in codes:
        number, what = errno.ETIMEDOUT, "did not answer in time"
    elif no_answer or status == 429 or status >= 500:
        what = "did not answer as it should, and all retries were used up: try again"
        return ConnectionError(errno.ECONNABORTED, f"{doing}: the store {what} ({error})")
    elif status not in _OF_THE_DATA:
        number = errno.EPROTO
        what = "refused the request: check the bucket's region and the endpoint"
    else:
        return None
    return OSError(number, f"{doing}: the store {what} ({error})")


def failure(error: BaseException, doing: str) -> Exception:
    """``refusal``, or else a CheckpointError."""
    return refusal(error, doing) or CheckpointError(f"{doing}: {error}")


_ABSENT = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG}
)
"""What the system says of a file that is missing, or is no file: of a checkpoint, that is damage."""


def unreadable(
    error: BaseException, doing: str, *, file: str | None = None, leaf: str | None = None
) -> Exception:
    """The error for data that could not be read: CheckpointCorrupt, unless the system or the store refused. A restore
    goes back to the step before a damaged one, which it must not do because a token expired or memory ran out.
    """
    refused = refusal(error, doing)
    if refused is not None and refused.errno not in _ABSENT:
        return refused
    return CheckpointCorrupt(f"{doing}: {error}", file=file, leaf=leaf)


def checked_answer(found: Any, doing: str) -> Any:
    """What a read without conditions gave. OSError if a policy refused it with a status for unmet conditions (304, 412),
    which TensorStore gives back as a value of an unknown state.
    """
    if found.state == "unspecified":
        raise unmet_condition(doing)
    return found


def unmet_condition(doing: str) -> OSError:
    """The error for a request that had no condition, and was answered that its condition is not met."""
    advice = "check what policies the bucket and the organization have"
    text = f"{doing}: the store refused the request (412, or 304): {advice}"
    return OSError(errno.EPROTO, text)


def result_of(future: Any, doing: str, timeout_secs: float | None = None) -> Any:
    """The value of a TensorStore future. After ``timeout_secs`` TimeoutError; the store may still carry the request out."""
    try:
        error = future.exception(timeout=timeout_secs)
    except TimeoutError:
        if timeout_secs is None or future.done():
            raise
        future.cancel()
        raise TimeoutError(
            errno.ETIMEDOUT,
            f"{doing}: the store did not answer within {timeout_secs:g} s, which is Options.timeout_secs",
        ) from None
    if error is not None:
        raise failure(error, doing) from error
    return future.result()


_CACHE_BYTES = 100_000_000
INDEX_FILE = "manifest.ocdbt"  # the file of a database that leads to all others
_RETRIES = {"max_retries": 12, "initial_delay": "500ms", "max_delay": "8s"}
"""About a minute in all; by default it would be a quarter of an hour."""
_STALLS = {
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
"""A connection on which nothing moves for a minute is given up, and the request repeated; TensorStore, which reads these at
its first request, would wait for ever."""
_IO_THREADS = min(16, max(4, os.cpu_count() or 1))  # more would slow the training step down


@dataclass(frozen=True, slots=True)
class Location:
    """A directory of a file system, or a prefix of an object store."""

    path: str  # absolute, or a URL (``memory://``, ``s3://``, ``gs://``); no trailing slash
    local: bool  # in a file system; False for the path of a mounted bucket
    storage_options: Mapping[str, Any] | None = field(default=None, hash=False)  # of a store

    def __truediv__(self, name: str) -> Location:
        return replace(self, path=f"{self.path.rstrip('/')}/{name}") if name else self

    def spec(self) -> dict[str, Any]:
        """TensorStore's spec of the location; CheckpointError if the path is not valid UTF-8."""
        path = self.path.rstrip("/") + "/"
        if path.startswith(ROOTS):
            refuse_path(self.path)
            return {"driver": "file", "path": path}
        for name, value in _STALLS.items():
            os.environ.setdefault(name, value)
        scheme, _, rest = path.partition("://")
        if scheme == "memory":
            return {"driver": "memory", "path": rest}
        bucket, _, below = rest.partition("/")  # TensorStore would decode ``%41`` in a URL
        server = {"s3": _s3_server, "gs": _google}[scheme](self.storage_options or {})
        return {**server, "bucket": bucket, "path": below}


def _s3_server(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Endpoint, region and credentials: as chosen, or from the variables that the AWS tools read. TensorStore reads only those
    of credentials, and these are named as the source, or it would look elsewhere first, and log that at length.
    """
    read = {
        "endpoint": ("endpoint_url", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "aws_region": ("region", "AWS_REGION", "AWS_DEFAULT_REGION"),
    }
    server: dict[str, Any] = {"driver": "s3"}
    for member, (name, *variables) in read.items():
        found = chosen.get(name) or next(filter(None, map(os.environ.get, variables)), "")
        if found:
            server[member] = found.rstrip("/")
    if chosen.get("anon"):
        server["aws_credentials"] = {"type": "anonymous"}
    elif "AWS_ACCESS_KEY_ID" in os.environ and "profile" not in chosen:
        server["aws_credentials"] = {"type": "environment"}
    elif found := profile_credentials(chosen.get("profile")):
        server["aws_credentials"] = found
    if chosen.get("requester_pays"):
        server["requester_pays"] = True
    return server


def _google(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The protocol, and the project that pays for requests."""
    server: dict[str, Any] = {"driver": "gcs_grpc" if chosen.get("grpc") else "gcs"}
    if isinstance(project := chosen.get("requester_pays"), str):
        server["gcs_user_project"] = {"project_id": project}
    return server


@functools.cache
def _process_wide() -> Any:
    """Parent context of the process: keeps the content of ``memory://`` between saves and loads."""
    return ts.Context({"memory_key_value_store": {}})


def new_context() -> StoreContext:
    """A new TensorStore context for one load; the next needs another, as the cache may hold a directory that was replaced."""
    HOME.is_used = True
    if os.getpid() != HOME.pid:
        raise forked()
    settings = {
        "cache_pool": {"total_bytes_limit": _CACHE_BYTES},
        "file_io_concurrency": {"limit": _IO_THREADS},
        "s3_request_retries": _RETRIES,
        "gcs_request_retries": _RETRIES,
    }
    return functools.cache(lambda: ts.Context(settings, _process_wide()))


_COUNTS = "/tensorstore/http/response_codes"
_REPEATED = ("408", "429")  # answers after which TensorStore asks again, as after those from 500 on
_LISTINGS = 12  # tries of a listing in Google's store while other requests are refused


class KeyValues:
    """Keys and values below one location of an object store. Every call blocks, each request at most ``timeout_secs`` with its
    repetitions. OSError if the store refused or did not answer (see ``refusal``), CheckpointError for any other failure.
    """

    def __init__(self, location: Location, timeout_secs: float = Options.timeout_secs) -> None:
        self._path = location.path
        self._timeout_secs = timeout_secs
        try:
            opening = ts.KvStore.open(location.spec(), context=new_context()())
        except ValueError as error:  # no such name of a bucket
            raise failure(error, f"{self._path}: cannot open") from error
        self._store: Any = self._done("open", opening)

    def get(self, key: str, first_bytes: int | None = None) -> bytes | None:
        if first_bytes is None:
            return self.get_version(key)[0]
        first = self._store.read(key, byte_range=slice(0, first_bytes))
        with contextlib.suppress(CheckpointError):  # the value is shorter
            return self._found(key, first)[0]
        return (self.get(key) or b"")[:first_bytes]

    def put(self, key: str, value: bytes) -> None:
        self._write_all("write", {key: value})

    def get_version(self, key: str) -> tuple[bytes | None, Any]:
        return self._found(key, self._store.read(key))

    def put_all(self, values: Mapping[str, bytes]) -> None:
        self._write_all("write", values)

    def put_if_unchanged(self, key: str, value: bytes, version: Any) -> bool:
        writing = self._store.write(key, value, if_equal=version)
        written = bool(self._done(f"write {key}", writing).generation)
        self._expect("412", not written)
        return written

    def list(self, prefix: str = "") -> list[str]:
        """Every key that begins with ``prefix``; from Google's store, listed again if any request of this process was refused
        meanwhile. Of its answer to a listing TensorStore does not look at the status: a refusal with a JSON body lists
        nothing. But it counts the answers of the process by status.
        """
        doing = f"{self._path}: cannot list {prefix!r}"
        keys = ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else "")
        refused, failed = Counter[str](), None
        for tried in range(_LISTINGS):
            if tried > 1:  # others are at work: let them get their answers
                time.sleep(min(0.01 * 2**tried, 0.3))
            before, found, failed = _refused(), list[bytes](), None
            try:
                found = result_of(self._store.list(keys), doing, self._timeout_secs)
            except CheckpointError as error:
                failed = error
            refused = _refused() - before
            if not refused or not self._path.startswith("gs://"):
                if failed is not None:
                    raise failed
                return [key.decode(errors="surrogateescape") for key in found]
        answer = ValueError(f"it was answered with [http_response_code='{min(refused)}']")
        raise (refusal(answer, doing) or unmet_condition(doing)) from failed

    def delete(self, keys: Iterable[str]) -> None:
        # delete_range would list, and tell of a refusal no more than that does
        self._write_all("delete", dict.fromkeys(keys))

    def _write_all(self, doing: str, values: Mapping[str, bytes | None]) -> None:
        """Writes values, or deletes, in parallel; raises a failure when no request is under way that could meet what somebody writes next."""
        writing = [(key, self._store.write(key, value)) for key, value in values.items()]
        first: Exception | None = None
        for key, future in writing:
            try:
                if not self._done(f"{doing} {key}", future).generation:
                    raise unmet_condition(f"{self._path}: cannot {doing} {key}")
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _found(self, key: str, future: Any) -> tuple[bytes | None, Any]:
        """The value, or None, and the version that a read without conditions gave."""
        found = self._done(f"read {key}", future)
        checked_answer(found, f"{self._path}: cannot read {key}")
        self._expect("404", found.state == "missing")
        return (bytes(found.value) if found.state == "value" else None), found.stamp.generation

    def _expect(self, status: str, answered: bool) -> None:
        """Notes an answer that is no refusal, for ``_refused``."""
        if answered and self._path.startswith(("gs://", "s3://")):
            with _expecting:
                _expected[status] += 1

    def _done(self, doing: str, future: Any) -> Any:
        """The result of a request, once it is there."""
        return result_of(future, f"{self._path}: cannot {doing}", self._timeout_secs)


_expected = Counter[str]()
"""How often a store said to ``KeyValues`` that a key is missing, or not as a condition says, by HTTP status."""
_expecting = threading.Lock()


def _refused() -> Counter[str]:
    """How often stores have refused this process, by HTTP status; without repetitions, and answers that were expected."""
    with _expecting:
        counts = Counter({status: -count for status, count in _expected.items()})
    for metric in ts.experimental_collect_matching_metrics(_COUNTS):
        for entry in metric["values"]:
            code = str(entry.get("code", ""))
            if code.startswith("4") and code not in _REPEATED:
                counts[code] += int(entry["value"])
    return counts


def range_of(store: Any, key: str, future: Any, start: int, stop: int) -> bytes | None:
    """The bytes of a range, fewer at the end of the value, from a read that was started (``future``); None if there is no
    such key. If the range seems to be outside of the value, all is read: for ``rclone serve s3``, TensorStore takes the
    length of the range for that of the value.
    """
    error, part = future.exception(), slice(None)
    if error is not None:
        if not isinstance(error, ValueError) or "OUT_OF_RANGE" not in str(error):
            raise error
        future, part = store.read(key), slice(start, stop)
    found = checked_answer(future.result(), f"cannot read {key}")
    return found.value[part] if found.state == "value" else None


def open_keys(location: Location, timeout_secs: float = Options.timeout_secs) -> Keys:
    """The keys and values below a location of an object store, or of a bucket that is mounted as a directory."""
    if location.path.startswith(ROOTS):
        return MountedFiles(location.path)
    return KeyValues(location, timeout_secs)


def backend_of(local: bool, options: Options | None = None) -> Backend:
    """The backend for checkpoints in a file system (``local``) or an object store; options say how to reach that."""
    if local:
        return PosixBackend()
    chosen = options or Options()

    def keys_at(url: str) -> Keys:
        return open_keys(Location(url, False, chosen.storage_options), chosen.timeout_secs)

    return ObjectStoreBackend(keys_at)


_FILES = {
    "credentials_file": ("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
    "config_file": ("AWS_CONFIG_FILE", "config"),
}
_HAS_CREDENTIALS = ("aws_access_key_id", "role_arn")


def profile_credentials(chosen: str | None) -> dict[str, Any] | None:
    """TensorStore's spec of the credentials of a profile: ``chosen``, or what ``AWS_PROFILE`` names, or ``default``
    if that has credentials. None without any: the file of a machine that has a role says no more than the region.
    """
    files = {
        member: os.environ.get(variable) or os.path.expanduser(f"~/.aws/{name}")
        for member, (variable, name) in _FILES.items()
    }
    named = chosen or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    if not named and not any(map(_has_default, files.values())):
        return None
    there = {member: file if os.path.isfile(file) else os.devnull for member, file in files.items()}
    return {"type": "profile", "profile": named or "default", **there}


def _has_default(file: str) -> bool:
    read = configparser.RawConfigParser(strict=False, allow_no_value=True, default_section="")
    try:
        read.read(file, "utf-8")
    except (OSError, ValueError, configparser.Error):
        return False
    names = [name for name in read.sections() if name.split()[-1:] == ["default"]]
    return any(read.has_option(name, option) for name in names for option in _HAS_CREDENTIALS)
