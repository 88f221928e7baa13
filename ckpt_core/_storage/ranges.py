"""Ranges of stored values, also from servers that do not say how long a value is."""

from __future__ import annotations

from typing import Any

_OUT_OF_RANGE = "OUT_OF_RANGE"


def range_of(store: Any, key: str, future: Any, start: int, stop: int) -> bytes | None:
    """The bytes of a range whose read was started, fewer at the end of the value; None if there is no such key.

    If TensorStore finds the range to be outside of the value, all of the value is read: it may only be
    shorter, and ``rclone serve s3`` answers so that TensorStore takes the length of the range for that of
    the value.

    Args:
        store: TensorStore's key-value store.
        key: the key.
        future: of ``store.read(key, byte_range=slice(start, stop))``.
        start, stop: the range.

    Raises:
        ValueError: as TensorStore raises it.
    """
    error = future.exception()
    if error is None:
        found = future.result()
        return found.value if found.state == "value" else None
    if not isinstance(error, ValueError) or _OUT_OF_RANGE not in str(error):
        raise error
    whole = store.read(key).result()
    return whole.value[start:stop] if whole.state == "value" else None
