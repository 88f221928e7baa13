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


class Peer(NamedTuple):
    """Where a process serves its parts.

    Attributes:
        machine: identifies the machine on which it runs.
        address: IP address.
        port: port; 0 if it serves nothing.
    """

    machine: str
    address: str
    port: int


def authorization(secret: str) -> str:
    """The header by which a request shows that it comes from this job."""
    return f"Bearer {secret}"


class Connection:
    """A connection to a peer; files are fetched one after the other.

    Args:
        peer: where to.
        secret: the secret of the job.
        block_bytes: size of the pieces in which files come.
        idle_secs: maximum time in which no byte comes.
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
            pass

    def pieces(
        self, step: int, token: str, writer: int, position: int | Literal["done"]
    ) -> Iterator[bytes]:
        """The content of one file, block by block.

        Raises:
            ConnectionError: the peer does not answer, has no such file, or stopped midway.
        """
        where = f"{self._peer.address}:{self._peer.port}"
        try:
            if time.monotonic() - self._used > IDLE_SECS / 2:
                self._http.close()  # what came was being written: the peer may have hung up meanwhile
            self._http.request("GET", f"/{step}/{token}/{writer}/{position}", headers=self._headers)
            answer = self._http.getresponse()
            if answer.status != 200:
                answer.read()
                raise ConnectionError(
                    f"{where} refused file {position} of the part of process {writer} of step {step}: "
                    f"{answer.status} {answer.reason}"
                )
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
