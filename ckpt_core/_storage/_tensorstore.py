"""TensorStore, imported at first use, and what its failures stand for: the system or the store refused, or the data is at fault.

A load of uncompressed arrays from a file system does not need it. It raises a ValueError for nearly everything; its text
begins with a status code of https://abseil.io/docs/cpp/guides/status-codes and ends with what the system or the HTTP server
answered.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_core._errors import CheckpointCorrupt, CheckpointError
from ckpt_core._lazy import LazyModule

if TYPE_CHECKING:
    import tensorstore as ts
else:
    ts = LazyModule("tensorstore")

__all__ = ["StoreContext", "ts"]
StoreContext = Callable[[], Any]
"""Gives TensorStore's context of one load, which is made at the first call: so that is one of the thread that plans, before
others. To import TensorStore takes 10 ms, 50 from a cold disk."""

_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")
_CURL_ERROR = re.compile(r"curl_code='\d+'")
_HTTP_STATUS = re.compile(r"http_response_code='(\d+)'")
_CODE = re.compile(r"(?:^|: )([A-Z_]{5,}): ")
_NO_ACCESS = frozenset({"PERMISSION_DENIED", "UNAUTHENTICATED"})
_NO_ANSWER = frozenset({"ABORTED", "UNAVAILABLE", "RESOURCE_EXHAUSTED"})
_BAD_CREDENTIALS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
"""What S3 answers with status 400, as if the request were malformed."""
_NO_PROFILE = "Failed to create credentials provider"
_OF_THE_DATA = frozenset({0, 304, 404, 412, 416})
"""HTTP statuses that say something of the object, or none: every other one is the store's refusal."""


def refusal(error: BaseException, doing: str) -> OSError | None:
    """The OSError that a failure raised by TensorStore stands for, where the system or the store refused; None
    if the data itself is at fault. ``doing`` says what was tried, with the path or URL, and begins the message.
    """
    if isinstance(error, OSError) and error.errno:
        return OSError(error.errno, f"{doing}: {os.strerror(error.errno)} ({error})")
    text = str(error)
    system = _SYSTEM_ERROR.search(text)
    if system is not None:
        number = int(system[1])
        return OSError(number, f"{doing}: {os.strerror(number)} ({error})")
    found = _HTTP_STATUS.search(text)
    status = int(found[1]) if found else 0
    codes = set(_CODE.findall(text[: found.start() if found else None]))
    expired = status == 400 and any(f"<Code>{code}</Code>" in text for code in _BAD_CREDENTIALS)
    expired = expired or _NO_PROFILE in text
    if status in (401, 403) or codes & _NO_ACCESS or expired:
        return PermissionError(
            errno.EACCES,
            f"{doing}: the store refused access: check that its credentials are there, are not expired, and "
            f"allow this ({error})",
        )
    if status == 404:  # an object that is missing is no failure of a request
        return FileNotFoundError(
            errno.ENOENT, f"{doing}: there is no such bucket: make it first ({error})"
        )
    if "DEADLINE_EXCEEDED" in codes:
        return TimeoutError(errno.ETIMEDOUT, f"{doing}: the store did not answer in time ({error})")
    no_answer = not status and _CURL_ERROR.search(text)  # such as a certificate that is not valid
    if no_answer or status == 429 or status >= 500 or codes & _NO_ANSWER:
        return ConnectionError(
            errno.ECONNABORTED,
            f"{doing}: the store did not answer as it should, and all retries were used up: try again "
            f"({error})",
        )
    if status not in _OF_THE_DATA:
        return OSError(
            errno.EPROTO,
            f"{doing}: the store refused the request: check the bucket's region and the endpoint ({error})",
        )
    return None


def is_shorter(error: BaseException) -> bool:
    """Whether a read failed since the object is gone, or does not reach as far."""
    codes = set(_CODE.findall(str(error)))
    return bool(codes & {"NOT_FOUND", "OUT_OF_RANGE"}) and refusal(error, "") is None


def failure(error: BaseException, doing: str) -> Exception:
    """``refusal``, or else a CheckpointError."""
    return refusal(error, doing) or CheckpointError(f"{doing}: {error}")


_UNKNOWN = "unspecified"
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


def answered(found: Any, doing: str) -> Any:
    """What a read without conditions gave. OSError if the store refused it with a status for unmet conditions
    (304, 412), as an organization's policy does: TensorStore gives that back as a value of an unknown state.
    """
    if found.state == _UNKNOWN:
        raise refused_oddly(doing)
    return found


def carried_out(stamp: Any, doing: str) -> Any:
    """What a write or a deletion without conditions gave; raises as ``answered``."""
    if not stamp.generation:
        raise refused_oddly(doing)
    return stamp


def refused_oddly(doing: str) -> OSError:
    """The error for a request that had no condition, and was answered that its condition is not met."""
    return OSError(
        errno.EPROTO,
        f"{doing}: the store refused the request (412, or 304): check what policies the bucket and the organization "
        "have",
    )


def settled(future: Any, doing: str, timeout_secs: float | None = None) -> Any:
    """The value of a TensorStore future; blocks until it is done. A signal handler's exception during the wait is raised unchanged.
    After ``timeout_secs`` (None: no limit) the request is given up with TimeoutError, but the store may still carry it out.
    """
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
