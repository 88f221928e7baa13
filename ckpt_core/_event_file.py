"""Event files of TensorBoard, by its own writer, which needs neither torch nor tensorflow."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any


class EventFile:
    """An event file in a directory; one thread at a time may add to it.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
            # Generated from protocol buffers, so without types.
            self._protos: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "events.TensorBoard needs the package tensorboard: pip install 'ckpt-core[tensorboard]'"
            ) from error
        self._writer = writer.EventFileWriter(os.fspath(directory))

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Adds one value."""
        event = self._protos.Event(wall_time=time.time(), step=step)
        event.summary.value.add(tag=tag, simple_value=value)
        self._writer.add_event(event)

    def summary(self, summary: Any, step: int = 0) -> None:
        """Adds what a plugin of TensorBoard has made."""
        event = self._protos.Event(wall_time=time.time(), step=step, summary=summary)
        self._writer.add_event(event)

    def flush(self) -> None:
        """Blocks until all that was added is written."""
        self._writer.flush()

    def close(self) -> None:
        """Writes the rest and closes the file."""
        self._writer.close()
