"""Catching a message in a test, by the place in the source that it covers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Said:
    """What a message said."""

    text = ""
    error: BaseException | None = None

    def after(self, begin: str) -> str:
        """What stands after the last occurrence of a text, to the end of its line."""
        _, found, rest = self.text.rpartition(begin)
        assert found, f"{begin!r} is not in: {self.text}"
        return rest.partition("\n")[0]

    def between(self, begin: str, end: str) -> str:
        """What stands between two texts: code, a command line, a path, to be taken as it is spelled."""
        _, found, rest = self.text.partition(begin)
        assert found, f"{begin!r} is not in: {self.text}"
        inside, found, _ = rest.partition(end)
        assert found, f"no {end!r} after {begin!r} in: {self.text}"
        return inside


def fragment_of(key: str) -> str:
    """Of ``module.py: part of a text``, the part."""
    return key.partition(".py: ")[2]


@contextmanager
def told(key: str, *, of: type[BaseException] = Exception) -> Iterator[Said]:
    """The block raises an error with the message of ``key``, and no other."""
    said = Said()
    with pytest.raises(of) as caught:
        yield said
    said.error = caught.value
    said.text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert fragment_of(key) in said.text, said.text


def logged(key: str, caplog: pytest.LogCaptureFixture) -> Said:
    """The message of ``key`` was logged as a warning."""
    said = Said()
    said.text = "\n".join(record.getMessage() for record in caplog.records)
    # What is filled into a log's text stands in the source as %s.
    for part in fragment_of(key).split("%s"):
        assert part in said.text, said.text
    return said
