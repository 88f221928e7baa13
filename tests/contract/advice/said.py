"""Saves that do not wait for the disk, and catching a message by a part of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import ckpt_core as ckpt

FAST = ckpt.Options(durable=False)


def save(path: Any, *state: Any, **named: Any) -> None:
    ckpt.save(path, *state, options=FAST, **named)


class Said:
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


@contextmanager
def told(fragment: str, *, of: type[BaseException] = Exception) -> Iterator[Said]:
    """The block raises an error with this in its message, and no other."""
    said = Said()
    with pytest.raises(of) as caught:
        yield said
    said.error = caught.value
    said.text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert fragment in said.text, said.text


def logged(fragment: str, caplog: pytest.LogCaptureFixture) -> Said:
    """A warning with this was logged; ``%s`` stands for what was filled in."""
    said = Said()
    said.text = "\n".join(record.getMessage() for record in caplog.records)
    for part in fragment.split("%s"):
        assert part in said.text, said.text
    return said
