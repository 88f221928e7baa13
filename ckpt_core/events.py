"""Ready-made listeners for ``Options(on_event=)``: TensorBoard, a progress bar, or several at once.

A listener is any function of an ``Event``. It is called in the thread where the event happens, of asynchronous saves
in the background; its errors are logged and do not affect the checkpoint.

Example:
    >>> import ckpt_core as ckpt, numpy as np
    >>> seen = []
    >>> options = ckpt.Options(on_event=lambda event: seen.append(event.kind))
    >>> ckpt.save("/tmp/ckpt-docs/events", {"w": np.ones(3)}, overwrite=True, options=options)
    >>> seen
    ['save_started', 'snapshot_taken', 'committed']
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from typing import Any

from ckpt_core._operation import Event as Event, Listener as Listener, each as each


class EventFile:
    """An event file of TensorBoard, by its own writer, which needs neither torch nor tensorflow; one thread at a time may add to it."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
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

    def summary(self, summary: Any) -> None:
        """Adds what a plugin of TensorBoard has made."""
        self._writer.add_event(self._protos.Event(wall_time=time.time(), summary=summary))

    def flush(self) -> None:
        """Blocks until all that was added is written."""
        self._writer.flush()

    def close(self) -> None:
        """Writes the rest and closes the file."""
        self._writer.close()


class TensorBoard(EventFile):
    """Writes duration, bytes and speed of saves and restores as scalars; needs ``tensorboard``.

    The scalars are ``blocked_secs``, ``total_secs``, ``bytes``, ``gb_per_sec`` and ``failures`` of ``ckpt/save``,
    ``total_secs``, ``bytes`` and ``gb_per_sec`` of ``ckpt/restore``, and ``ckpt/deleted``. Their step is that of the
    checkpoint, or a running number outside of a Checkpointer.

    Args:
        directory: directory for the event file.

    Example:
        >>> import ckpt_core as ckpt, numpy as np
        >>> board = ckpt.events.TensorBoard("/tmp/ckpt-docs/board")
        >>> options = ckpt.Options(on_event=board)
        >>> with ckpt.Checkpointer("/tmp/ckpt-docs/run", options=options) as checkpointer:
        ...     _ = checkpointer.save(0, {"w": np.ones(3)}, overwrite=True)
        >>> board.close()
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__(directory)
        self._lock = threading.Lock()
        self._count = 0

    def __call__(self, event: Event) -> None:
        for name, value in _scalars(event).items():
            with self._lock:
                self._count += 1
                step = self._count if event.step is None else event.step
                self.scalar(name, value, step)


def _scalars(event: Event) -> dict[str, float]:
    """Tag -> value of the scalars for an event."""
    if event.kind == "snapshot_taken":
        return {"ckpt/save/blocked_secs": event.secs}
    if event.kind in ("committed", "restored"):
        group = "ckpt/save" if event.kind == "committed" else "ckpt/restore"
        return {
            f"{group}/total_secs": event.secs,
            f"{group}/bytes": float(event.bytes),
            f"{group}/gb_per_sec": event.bytes / max(event.secs, 1e-9) / 1e9,
        }
    counted = {"save_failed": "ckpt/save/failures", "deleted": "ckpt/deleted"}
    return {counted[event.kind]: 1.0} if event.kind in counted else {}


class ProgressBar:
    """Shows long saves and restores on a terminal, and nothing elsewhere; needs ``rich``.

    Args:
        console: a ``rich.console.Console``; by default one on standard error.
        min_secs: saves and restores shorter than this are not shown.

    Example:
        >>> import ckpt_core as ckpt
        >>> options = ckpt.Options(on_event=ckpt.events.ProgressBar())
    """

    def __init__(self, console: Any = None, *, min_secs: float = 0.5) -> None:
        try:
            from rich import progress
            from rich.console import Console
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "events.ProgressBar needs the package rich: pip install 'ckpt-core[cli]'"
            ) from error
        console = Console(stderr=True) if console is None else console
        self._shown = bool(console.is_terminal)
        self._bars: Any = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._min_secs = min_secs
        self._tasks: dict[tuple[str, int], Any] = {}
        self._doing: dict[tuple[str, int], str] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if not self._shown:
            return
        # The thread is part of the key: a save and a restore of one path may run at the same time.
        key = (event.path, threading.get_ident())
        with self._lock:
            if event.kind == "restore_started":
                self._doing[key] = "loading"
            elif event.kind in ("committed", "save_failed", "restored", "restore_failed"):
                self._doing.pop(key, None)
                if key in self._tasks:
                    self._bars.remove_task(self._tasks.pop(key))
                if not self._tasks:
                    self._bars.stop()
            elif event.kind == "progress" and (key in self._tasks or event.secs >= self._min_secs):
                if key not in self._tasks:
                    step, name = event.step, os.path.basename(event.path)
                    title = f"{self._doing.get(key, 'saving')} {name if step is None else f'step {step}'}"
                    self._bars.start()
                    self._tasks[key] = self._bars.add_task(title, total=None)
                # without a total it pulses
                total = event.total_bytes if event.bytes else None
                self._bars.update(self._tasks[key], completed=event.bytes, total=total)
