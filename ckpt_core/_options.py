"""Settings of a save or load, in one frozen dataclass."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        compression: None, or a codec for all arrays: ``"zstd"`` (level 1), ``"zstd:<level>"``,
            ``"blosc"`` (lz4, level 5), ``"blosc:<compressor>:<level>"``. Or a mapping from patterns
            of paths, as in ``load(only=)``, to codecs or None: the first that matches counts, the
            rest is not compressed, and a pattern that matches no leaf is a ValueError of the save.
            Float weights shrink by a tenth or two at a quarter of the speed.
        link_unchanged: a Checkpointer on a local file system, in a run of one process, writes no
            array again that is as it was in its last step (the same object with the same
            checksums, or any of 1 MiB and more, not compressed, with the same bytes): it shares
            that step's data files by hard links. Each step stays whole
            by itself, whichever others are deleted, and damage is detected as ever; but a bad
            sector in a shared file damages all the steps that share it. On, because most of such
            state (frozen weights, embeddings) can be had elsewhere, and steps that each took the
            full time and room would be fewer. Off for those who keep several steps against
            failing disks. Files under 1 MiB are never shared.
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
        snapshot: where an asynchronous save of arrays on an accelerator copies them before it
            returns. ``"host"``: to the host, and waits for it. ``"device"`` and ``"pinned_host"``:
            to free memory of the device, or to page-locked memory of the host, without waiting:
            the copy is enqueued before the next step, and out of memory would be that step's error.
        broadcast: where several processes hold the same part of an array, one of them reads and
            verifies it, and the others receive it over what connects their devices; all must load
            the same. It spares storage that all share; what every host has in its page cache or
            on a disk of its own is faster read by each. Only for loads that block.
        persist_policy: with ``local_directory=``, which of the saved steps the persistent directory
            takes too: a policy of ``ckpt.when``; None for all.
        local_max_to_keep: with ``local_directory=``, how many of the newest complete steps stay
            there.
        atomic_restore: read and verify everything before anything is changed, which takes memory
            for the old state and the new one. Else objects that can be set in parts (those of NNX
            and Keras) are set as arrays come, and are unusable where damage is met midway.

    Example:
        >>> import ckpt_core as ckpt
        >>> ckpt.Options(compression="zstd").durable
        True
    """

    durable: bool = True
    checksums: bool = True
    compression: str | Mapping[str, str | None] | None = None
    link_unchanged: bool = True
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
    snapshot: Literal["host", "device", "pinned_host"] = "host"
    broadcast: bool = False
    atomic_restore: bool = False
    persist_policy: Callable[[int, Any], bool] | None = None
    local_max_to_keep: int = 1

    def __post_init__(self) -> None:
        for name in ("max_host_bytes", "target_data_file_bytes", "chunk_bytes"):
            if getattr(self, name) < 1 * KIB:
                raise ValueError(f"Options.{name} must be at least 1024, got {getattr(self, name)}")
        if self.local_max_to_keep < 1:
            raise ValueError(
                f"Options.local_max_to_keep must be at least 1, got {self.local_max_to_keep}"
            )
        if self.persist_policy is not None and not callable(self.persist_policy):
            raise TypeError(
                "Options.persist_policy is a policy such as ckpt.when.every_steps(1000), got "
                f"{self.persist_policy!r}"
            )
        if self.timeout_secs <= 0:
            raise ValueError(f"Options.timeout_secs must be positive, got {self.timeout_secs}")
        if self.on_pending not in ("wait", "fail"):
            raise ValueError(
                f"Options.on_pending must be 'wait' or 'fail', got {self.on_pending!r}"
            )
        if self.snapshot not in ("host", "device", "pinned_host"):
            raise ValueError(
                f"Options.snapshot must be 'host', 'device' or 'pinned_host', got {self.snapshot!r}"
            )
        _check_names(self)
        compression = self.compression
        if isinstance(compression, Mapping):
            # a copy: what the caller does to the mapping later changes no save
            object.__setattr__(self, "compression", compression := dict(compression))
        codecs = compression.values() if isinstance(compression, dict) else (compression,)
        for codec in codecs:
            if codec is not None:
                codec_parts(codec)


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


_BLOSC_NAMES = ("lz4", "lz4hc", "blosclz", "snappy", "zlib", "zstd")


def codec_parts(codec: str) -> tuple[str, str, int]:
    """Name, compressor and level of a codec such as ``zstd:3`` or ``blosc:lz4:5``.

    Raises:
        ValueError: there is no such codec.
    """
    name, *rest = codec.split(":") if isinstance(codec, str) else ("",)
    if name == "zstd" and len(rest) <= 1 and _is_level(level := "".join(rest) or "1", 22):
        return name, name, int(level)
    compressor, level = (*rest, *("lz4", "5")[len(rest) :])[:2]
    if name == "blosc" and len(rest) <= 2 and compressor in _BLOSC_NAMES and _is_level(level, 9):
        return name, compressor, int(level)
    raise ValueError(
        "Options.compression must be None, 'zstd' or 'zstd:<level>' (up to 22), 'blosc', "
        f"'blosc:<compressor>' or 'blosc:<compressor>:<level>' (compressors {', '.join(_BLOSC_NAMES)}; "
        f"level up to 9), got {codec!r}"
    )


def _is_level(text: str, most: int) -> bool:
    return text.isascii() and text.isdigit() and int(text) <= most


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
        spelled = ""
        if isinstance(options, Mapping):
            inside = ", ".join(f"{name}={value!r}" for name, value in options.items())
            spelled = f": write options=ckpt_core.Options({inside})"
        raise TypeError(
            f"options must be ckpt_core.Options, got a {type(options).__name__}{spelled}"
        )
    return options


METRICS_ARE_NUMBERS = (
    'an object that is to be an item of this name is passed as items={"metrics": ...}, to save and restore '
    "it alike"
)
"""What to write instead of an object as ``metrics=``, for messages."""
