"""Fetches files of a part from the process that has it."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

from ckpt_core._options import MIB

BLOCK_BYTES = 4 * MIB
IDLE_SECS = 30.0
"""Maximum time in which a connection moves no byte, on either side."""
_MOST_REASON = 100
"""Maximum length of what is repeated of a refusal."""


class Peer(NamedTuple):
    """Where a process serves its parts."""

    address: str
    port: int  # 0 if it serves nothing


class Lacking(ConnectionError):
    """The peer was reached, and does not have the part: asked once more, it would say so again."""


def authorization(secret: str) -> str:
    """The header by which a request shows that it comes from this job."""
    return f"Bearer {secret}"


class Connection:
    """A connection to a peer; files are fetched one after the other, in pieces of ``block_bytes``. It fails if no
    byte comes for ``idle_secs``.
    """

    def __init__(
        self,
        peer: Peer,
        secret: str,
        block_bytes: int = BLOCK_BYTES,
        idle_secs: float = IDLE_SECS,
    ) -> None:
        self._block_bytes = block_bytes
        self._used = time.monotonic()
        self._peer = peer
        self._headers = {"Authorization": authorization(secret)}
        self._http = http.client.HTTPConnection(peer.address, peer.port, timeout=idle_secs)

    def say_done(self, step: int, token: str, writer: int) -> None:
        """Tells the peer that this process needs no more of a part; raises as ``pieces``."""
        for _ in self.pieces(step, token, writer, "done"):
            break  # there is nothing to be said

    def pieces(
        self, step: int, token: str, writer: int, position: int | Literal["done"]
    ) -> Iterator[bytes]:
        """The content of one file, block by block. Raises Lacking if the peer does not have the file, ConnectionError
        if it does not answer, cannot read the file, or stopped midway.
        """
        where = f"{self._peer.address}:{self._peer.port}"
        try:
            if time.monotonic() - self._used > IDLE_SECS / 2:
                self._http.close()  # what came was being written: the peer may have hung up meanwhile
            self._http.request("GET", f"/{step}/{token}/{writer}/{position}", headers=self._headers)
            answer = self._http.getresponse()
            if answer.status != 200:
                answer.close()  # whatever else it says
                self._http.close()
                text = (
                    f"{where} refused file {position} of the part of process {writer} of step {step}: "
                    f"{answer.status} {ascii(answer.reason[:_MOST_REASON])[1:-1]}"
                )
                lacks = answer.status == http.HTTPStatus.NOT_FOUND
                raise Lacking(text) if lacks else ConnectionError(text)
            missing = answer.length or 0
            while missing:
                data = answer.read(min(self._block_bytes, missing))
                if not data:
                    raise ConnectionError(
                        f"{where} stopped {missing} bytes before the end of a file"
                    )
                missing -= len(data)
                self._used = time.monotonic()
                yield data
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, ConnectionError) and str(error).startswith(where):
                raise
            raise ConnectionError(f"{where}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Closes it."""
        self._http.close()
