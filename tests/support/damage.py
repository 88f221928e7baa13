"""Damage that only checksums show."""

from __future__ import annotations

from pathlib import Path


def turn_a_bit(checkpoint: Path) -> Path:
    """Turns one bit in the middle of the largest data file, which is returned."""
    data = max(checkpoint.rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    return data
