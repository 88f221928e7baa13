"""Settings of a save or load, in one frozen dataclass."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to save and load; every default is the safe choice.

    Attributes:
        durable: fsync every file and directory before a save is acknowledged. Without it a
            power cut may lose an acknowledged step (a killed process still cannot).
        checksums: verify every byte that is loaded. They are always recorded.
        compression: None, or ``"zstd"`` (level 1) or ``"zstd:<level>"``. Float weights shrink by
            a tenth or two at a quarter of the speed.
        max_host_bytes: upper bound of the host memory that a save or load takes beyond the
            arrays themselves; a single larger chunk goes alone.
        timeout_secs: how long to wait for other processes at each agreement.
        target_data_file_bytes: size at which a data file is closed and the next one begun; several
            files are written at once.
        chunk_bytes: largest piece in which a shard is stored; pieces are written, verified and
            read in parallel.
        on_pending: what a save does while the previous asynchronous one is still running:
            ``"wait"`` for it, or ``"fail"`` with CheckpointError.
        on_event: called with an ``Event`` at each start and end of a save or restore and at each
            deletion, in the thread where it happens; see ``ckpt_core.events``.
        delete_grace_secs: how long a step stays that no policy keeps any more: for readers where
            file locks do not reach (object stores, some network file systems).
        trash_directory: name of a directory beside the steps into which they are moved instead of
            being deleted, such as ``"todelete"``.
        stop_signals: names of the signals that tell a run to stop.
        grace_secs: how long after such a signal the process lives: what a save at the end may take.
        broadcast: let one replica read and send to the others (several processes).
        zstd_level: the level that ``compression`` names; derived.
        atomic_restore: load everything before anything is changed. So far every restore does.

    Example:
        >>> import ckpt_core as ckpt
        >>> ckpt.Options(compression="zstd").durable
        True
    """

    durable: bool = True
    checksums: bool = True
    compression: str | None = None
    max_host_bytes: int = 4 * GIB
    timeout_secs: float = 600.0
    target_data_file_bytes: int = 64 * MIB
    chunk_bytes: int = 64 * MIB
    on_pending: Literal["wait", "fail"] = "wait"
    on_event: Callable[[Any], None] | None = None
    delete_grace_secs: float = 0.0
    trash_directory: str | None = None
    stop_signals: tuple[str, ...] = ("SIGTERM",)
    grace_secs: float | None = None
    broadcast: bool = False
    atomic_restore: bool = False
    zstd_level: int | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        for name in ("max_host_bytes", "target_data_file_bytes", "chunk_bytes"):
            if getattr(self, name) < 1 * KIB:
                raise ValueError(f"Options.{name} must be at least 1024, got {getattr(self, name)}")
        if self.timeout_secs <= 0:
            raise ValueError(f"Options.timeout_secs must be positive, got {self.timeout_secs}")
        if self.on_pending not in ("wait", "fail"):
            raise ValueError(
                f"Options.on_pending must be 'wait' or 'fail', got {self.on_pending!r}"
            )
        _check_names(self)
        object.__setattr__(self, "zstd_level", _zstd_level(self.compression))


def _check_names(options: Options) -> None:
    trash = options.trash_directory
    if trash is not None and (
        not trash or "/" in trash or trash.startswith(".") or trash.isdigit()
    ):
        raise ValueError(
            f"Options.trash_directory is the name of a directory beside the steps, got {trash!r}"
        )
    for name in options.stop_signals:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"Options.stop_signals are names such as 'SIGTERM', got {name!r}")
    for field_name in ("delete_grace_secs", "grace_secs"):
        secs = getattr(options, field_name)
        if secs is not None and not secs >= 0:
            raise ValueError(f"Options.{field_name} must not be negative, got {secs!r}")


def _zstd_level(compression: str | None) -> int | None:
    """The zstd level that ``Options.compression`` names, or None for no compression."""
    if compression is None:
        return None
    name, _, level = compression.partition(":")
    if name != "zstd" or not (level == "" or level.isdigit()):
        raise ValueError(
            f"Options.compression must be None, 'zstd' or 'zstd:<level>', got {compression!r}"
        )
    return int(level or 1)


DEFAULTS = Options()
"""What counts where the caller passes no options."""


def checked_options(options: Options | None) -> Options:
    """The options; the defaults for None.

    Raises:
        TypeError: something else was passed.
    """
    if options is None:
        return DEFAULTS
    if not isinstance(options, Options):
        raise TypeError(f"options must be ckpt_core.Options, got a {type(options).__name__}")
    return options
