"""Damage that only checksums show, and a disk that does not give what it holds."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def flip(file: Path, at: int | None = None) -> None:
    """Turns one bit of a byte of a file, by default of that in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    file.write_bytes(content)


def turn_a_bit(checkpoint: Path) -> Path:
    """Turns one bit in the middle of the largest data file, which is returned."""
    data = max(checkpoint.rglob("d/*"), key=lambda file: file.stat().st_size)
    flip(data)
    return data


FAILING_READ = """
def function(descriptor, what, offset, *flags):
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if where in path and "/d/" in path:
        met.append(path)
        raise OSError(number, os.strerror(number))
    return real(descriptor, what, offset, *flags)
"""
"""To be compiled as from no file: what a file of these tests raises counts as raised by a signal handler."""


FAILING_OPEN = """
def function(path, *flags, **more):
    if isinstance(path, str) and where in path:
        met.append(path)
        raise OSError(number, os.strerror(number), path)
    return real(path, *flags, **more)
"""
"""The same of opening a file."""


def failing_reads(
    patch: pytest.MonkeyPatch, where: Path, of: str = "preadv", number: int = errno.EIO
) -> list[str]:
    """Reads of data files whose paths contain ``where`` raise an error, EIO by default; the files that were to be read."""
    met: list[str] = []
    names: dict[str, Any] = {"real": getattr(os, of), "os": os, "number": number}
    names |= {"where": str(where), "met": met}
    exec(compile(FAILING_READ, "<injected>", "exec"), names)
    patch.setattr(os, of, names["function"])
    return met
