"""``Options``: settings of saves, loads and Checkpointers, in one frozen dataclass."""

from __future__ import annotations

import numbers
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from ckpt_core.arguments import an, answering, check_flags, nearest

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of saves, loads and Checkpointers; every default is the safe choice.

    Attributes: What many runs set
        durable: fsync every file and directory before a save is reported as done. Without it, a power failure (but
            not a killed process) may lose a step that was reported as done.
        compression: None, or a codec for all arrays: ``"zstd"`` (level 1), ``"zstd:<level>"``, ``"blosc"`` (lz4,
            level 5), ``"blosc:<compressor>:<level>"``. Or a mapping from path patterns, as in ``load(only=)``, to
            codecs or None: the first matching pattern is used, other arrays are not compressed, and a pattern that
            matches no leaf raises ValueError in the save. Float weights shrink by 7 to 22 %, and load at a tenth of the speed.
        snapshot: where an asynchronous save copies arrays of an accelerator before it returns.
            ``"host"``: to page-locked memory of the host; blocks until they are there. ``"device"``: to free memory
            of the device without blocking, and from there to the host beside training: an out-of-memory error
            appears in the next step. ``"pinned_host"``: to the host without blocking; a step that donates them waits.
        max_host_bytes: maximum host memory of a save or load in addition to the arrays themselves; a single larger
            chunk is processed alone.
        timeout_secs: maximum wait for other processes at each agreement; of a save into a bucket, also for
            the answer to one request.
        on_event: called with an ``Event`` at each start and end of a save or restore and at each deletion, in the
            thread where it happens; see ``ckpt_core.events``.

    Attributes: What a save writes, and when
        link_unchanged: hard-link the data files of the last step for arrays that did not change since. Only in a
            Checkpointer on a local file system with one process, for arrays that are the same object with the same
            checksums, or have at least 1 MiB, uncompressed, and the same bytes. Every step stays complete if others
            are deleted, and damage is detected, but a bad sector in a shared file damages all steps that share it:
            turn it off if you keep several steps as protection against failing disks. On by default, because such
            state (frozen weights, embeddings) can mostly be obtained elsewhere, and copies cost time and space. Files
            under 1 MiB are never shared.
        target_data_file_bytes: maximum size of a data file, if no chunk is larger; several are written in parallel.
        chunk_bytes: maximum size of a stored chunk of a shard; chunks are written, verified and read in parallel.
        on_pending: what a save does while the previous asynchronous one is still running: ``"wait"`` for it, or
            ``"fail"`` with CheckpointError, on all processes if it runs in any. Equal on all.
        background_priority: ``"low"``: on Linux, the threads of background saves and uploads take a core only while
            nothing else wants it, also while somebody waits for the save. Slows training less where its
            threads, or those of a data pipeline, take all cores; the save then takes longer, and as long as they do
            not pause perhaps very long. Blosc compresses in threads of TensorStore, which keep their priority.
            ``"normal"``: the priority of the caller.
        flat: describe a tree that is saved without a name a second time, at the top of its directory: some KB, no
            second copy of the arrays. There Orbax's ``PyTreeCheckpointer`` and ``StandardCheckpointer`` and
            ``flax.training.checkpoints`` look for it. Not for named items, and not in a bucket.

    Attributes: How a load reads
        checksums: verify every byte that is loaded. Checksums are always written.
        broadcast: if several processes hold the same region of an array, one of them reads and verifies it and sends
            it to the others over the interconnect of the devices; all processes must load the same. Reduces reads
            from shared storage; if each host has the data in its page cache or on its own disk, reading it on each
            is faster. Blocking loads only.
        page_cache: whether what a load reads from a local disk stays in the system's page cache. True: a second load
            of the same files reads no disk. False: memory is taken once and not twice, which restarts a large state
            sooner, and nothing else is pushed out of the cache; what is in it is read from there. None: False for an
            item of more than 1/16 of this process's memory without ``jax.distributed``. Items below 64 MiB, loads
            with ``max_host_bytes`` below 33 MiB, memory-mapped arrays, compressed chunks and checkpoints of Orbax are
            always read through the cache.
        atomic_restore: read and verify everything before changing anything; needs memory for the old and the new
            state. Otherwise objects that can be set in parts (those of NNX and Keras) are set while arrays are read,
            and are unusable if damage is found midway.

    Attributes: Stopping, deleting and reporting
        stop_signals: names of the signals that ask a run to stop. With several processes SIGTERM is one in any case.
        grace_secs: time from such a signal until the process is killed; limits the wait for saves.
        delete_grace_secs: how long a step stays after no policy keeps it any more; protects readers where file locks
            do not work (object stores, some network file systems).
        trash_directory: name of a directory next to the steps, such as ``"todelete"``, to which steps are moved
            instead of being deleted.
        report_secs: after so long, and at each multiple, a save or load that is still running says so in the log and
            as an event ``slow``: its phase, bytes done, rate, the processes that it waits for, memory; at the fifth
            time, once, also the stacks of its threads. None: never.

    Attributes: Local directories and buckets
        persist_policy: with ``local_directory=``, which saved steps also go to the persistent directory: a policy of
            ``ckpt.when``; None for all.
        local_max_to_keep: with ``local_directory=``, how many of the newest complete steps stay there.
        partners: with ``local_directory=`` and several processes, where a copy of each process's part of a
            local step is kept. None: nowhere. What every process holds (replicated arrays) is not lost
            with a host, since the parts of other processes serve as well; what one alone holds (its
            shards) is. ``"host"``: with a process on another machine; or a function
            ``(index, count) -> index of another process``. Copied in the background, which delays no step.
        peer_secret_file: with ``local_directory=`` and several processes, a file with at least 16 random bytes
            that only the job's user can read (mode 0600), the same on every host. Who does not know them cannot
            fetch local steps. None: process 0 makes such a file, ``.ckpt-secret``, in the persistent directory
            if that is in a file system. In a bucket the secret goes through jax's coordination service, from
            which anybody who reaches the coordinator's port can read it; a warning in the log says so.
        storage_options: how to reach a bucket, over what the environment says: ``endpoint_url``, ``region``,
            ``profile``, ``anon=True`` and ``requester_pays=True`` for ``s3://``; ``requester_pays="project"`` and
            ``grpc=True`` (a RAPID bucket) for ``gs://``. Ignored for directories.

    Example:
        >>> import ckpt_core as ckpt
        >>> ckpt.Options(compression="zstd").durable
        True
    """

    durable: bool = True
    compression: str | Mapping[str, str | None] | None = None
    snapshot: Literal["host", "device", "pinned_host"] = "host"
    max_host_bytes: int = 4 * GIB
    timeout_secs: float = 600.0
    on_event: Callable[[Any], None] | None = None

    link_unchanged: bool = True
    target_data_file_bytes: int = 64 * MIB
    chunk_bytes: int = 64 * MIB
    on_pending: Literal["wait", "fail"] = "wait"
    background_priority: Literal["low", "normal"] = "normal"
    flat: bool = False

    checksums: bool = True
    broadcast: bool = False
    page_cache: bool | None = None
    atomic_restore: bool = False

    stop_signals: tuple[str, ...] = ("SIGTERM",)
    grace_secs: float | None = None
    delete_grace_secs: float = 0.0
    trash_directory: str | None = None
    report_secs: float | None = 60.0

    persist_policy: Callable[[int, Any], bool] | None = None
    local_max_to_keep: int = 1
    partners: Literal["host"] | Callable[[int, int], int] | None = None
    peer_secret_file: str | os.PathLike[str] | None = None
    storage_options: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        """The settings that are not the defaults."""
        given, unset = vars(self), vars(DEFAULTS)
        changed = [f"{name}={given[name]!r}" for name in given if given[name] != unset[name]]
        return f"Options({', '.join(changed)})"

    def __post_init__(self) -> None:
        _check(self)
        if self.storage_options is not None:
            object.__setattr__(self, "storage_options", _storage_options(self.storage_options))
        compression = self.compression
        if isinstance(compression, Mapping):
            # A copy: the caller may change the mapping later.
            object.__setattr__(self, "compression", compression := dict(compression))
        codecs = compression.values() if isinstance(compression, dict) else (compression,)
        for codec in codecs:
            if codec is not None:
                codec_parts(codec)


_STORAGE_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("endpoint_url", "region", "profile"), str),
    **{"anon": bool, "requester_pays": (bool, str), "grpc": bool},
}


def _storage_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``Options.storage_options``; ValueError for an unknown name or a value of the wrong type."""
    for name, value in given.items():
        if name in ("key", "secret", "token"):
            raise ValueError(
                f"Options.storage_options: {name!r} is not taken, so that no secret gets into logs and job "
                "descriptions: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or "
                "GOOGLE_APPLICATION_CREDENTIALS"
            )
        if not isinstance(value, _STORAGE_OPTIONS.get(name, ())):
            known = ", ".join(_STORAGE_OPTIONS)
            raise ValueError(
                f"Options.storage_options has no {name}={value!r}; it takes {known}; the rest comes from the "
                "environment"
            )
    return dict(given)


_TYPES: dict[str, tuple[Any, str]] = {
    "on_event": (Callable, "a function that takes an event"),
    "persist_policy": (Callable, "a policy such as ckpt.when.every_steps(1000)"),
    "peer_secret_file": ((str, os.PathLike), "the path of a file"),
    "stop_signals": ((tuple, list, set, frozenset), "a tuple of names"),
    "storage_options": (Mapping, "a dict"),
    "trash_directory": (str, "the name of a directory"),
}
_AT_LEAST_KIB = (lambda value: value >= KIB, f"must be at least {KIB}")
_NOT_NEGATIVE = (lambda secs: secs >= 0, "must not be negative")
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("max_host_bytes", "target_data_file_bytes", "chunk_bytes"), _AT_LEAST_KIB),
    **dict.fromkeys(("delete_grace_secs", "grace_secs"), _NOT_NEGATIVE),
    "local_max_to_keep": (lambda number: number >= 1, "must be at least 1"),
    "report_secs": (lambda secs: secs > 0, "must be positive or None"),
    "timeout_secs": (lambda secs: secs > 0, "must be positive"),
    "on_pending": (("wait", "fail").__contains__, "must be 'wait' or 'fail'"),
    "background_priority": (("low", "normal").__contains__, "must be 'low' or 'normal'"),
    "snapshot": (
        ("host", "device", "pinned_host").__contains__,
        "must be 'host', 'device' or 'pinned_host'",
    ),
    "partners": (
        lambda partners: partners == "host" or callable(partners),
        "must be None, 'host' or a function (index, count) -> index",
    ),
    "trash_directory": (
        lambda name: name and "/" not in name and not name.startswith(".") and not name.isdigit(),
        "is the name of a directory beside the steps",
    ),
    "stop_signals": (
        lambda names: {*names} <= signal.Signals.__members__.keys() - {"SIGKILL", "SIGSTOP"},
        "are names such as 'SIGTERM'",
    ),
}


def _check(options: Options) -> None:
    """Raises TypeError or ValueError for the first setting of a type, or with a value, that it may not have."""
    for name, field in options.__dataclass_fields__.items():
        value, declared = getattr(options, name), str(field.type)
        if value is None and declared.endswith("None"):
            continue
        if declared.startswith("bool"):
            check_flags("Options.", **{name: value})
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if declared.startswith(("int", "float")) and not is_number:
            unit = name.rpartition("_")[2]
            raise TypeError(f"Options.{name} is a number of {unit}, got {value!r}")
        kinds, wanted = _TYPES.get(name, (object, ""))
        if not isinstance(value, kinds):
            raise TypeError(f"Options.{name} is {wanted}, got {value!r}")
        fits, words = _VALUES.get(name, (None, ""))
        if fits is not None and not fits(value):
            raise ValueError(f"Options.{name} {words}, got {value!r}")


_BLOSC_NAMES = ("lz4", "lz4hc", "blosclz", "snappy", "zlib", "zstd")


def codec_parts(codec: str) -> tuple[str, str, int]:
    """Name, compressor and level of a codec: ``blosc:lz4:5`` gives ``("blosc", "lz4", 5)``; ValueError for an unknown one."""
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


DEFAULTS = Options()  # the options of a call without ``options=``


def checked_options(options: Options | None) -> Options:
    """The options, or the defaults for None; TypeError for anything else."""
    if options is None:
        return DEFAULTS
    if not isinstance(options, Options):
        written = "..."
        if isinstance(options, Mapping):
            Options(**options)  # raises for what it would not take either
            written = ", ".join(f"{name}=..." for name in cast("Iterable[str]", options))
        advice = f"write options=ckpt.Options({written})"
        raise TypeError(f"options must be ckpt.Options, got {an(options)}: {advice}")
    return options


_OF_LOCAL_STEPS = ("persist_policy", "local_max_to_keep", "partners", "peer_secret_file")


def of_local_steps(options: Options) -> list[str]:
    """The fields that were set, and mean nothing without ``local_directory=``."""
    return [name for name in _OF_LOCAL_STEPS if getattr(options, name) != getattr(DEFAULTS, name)]


METRICS_ARE_NUMBERS = (
    'an object that is to be an item of this name is passed as items={"metrics": ...}, to save and restore '
    "it alike"
)
"""Advice in messages about an object passed as ``metrics=``."""


CHECKPOINTER_ARGUMENTS = frozenset(
    (
        *("directory", "local_directory", "save_interval_steps", "max_to_keep", "keep_period"),
        *("best_metric", "best_mode", "save_policy", "keep_policy", "asynchronous", "read_only"),
        *("step_prefix", "step_format_fixed_length"),
    )
)
_SETTINGS = frozenset(Options.__dataclass_fields__)
RESTORE_ARGUMENTS = (
    *("items", "only", "rename", "rules", "cast", "missing", "unexpected", "options"),
    *("static", "strict_latest", "sharding", "as_numpy", "select"),
)
"""What restores take by keyword beside their targets: a target of such a name could not be passed by keyword."""
_OWNERS = {
    **dict.fromkeys(("force", "metrics"), "Checkpointer.save"),
    **dict.fromkeys(("sharding", "as_numpy", "select"), "load"),
    "rules": "load and restore",
    "strict_latest": "Checkpointer.restore_latest",
    "options": "ckpt.save, ckpt.restore, ckpt.load and ckpt.Checkpointer(...)",
}
"""The calls that have an argument which others of the same kind lack."""


def _unknown_setting(name: str) -> str:
    if name in CHECKPOINTER_ARGUMENTS:
        return f"{name}= is an argument of ckpt.Checkpointer(...), and no setting: pass it there, not in Options"
    if name == "local_max_bytes":
        return "Options has no local_max_bytes: `ckpt rm --local DIRECTORY` removes what ended runs left there"
    close = nearest(name, _SETTINGS)
    meant = f": write {close}=..." if close else "; help(ckpt.Options) lists all"
    return f"Options has no setting {name!r}{meant}"


def unknown_argument(name: str) -> str:
    """What is said of a name that ``Checkpointer`` does not have."""
    meant = "; help(ckpt.Checkpointer) lists all"
    if name not in _SETTINGS and (close := nearest(name, CHECKPOINTER_ARGUMENTS, 0.7)):
        meant = f": write {close}=..."
    elif close := nearest(name, _SETTINGS, 0.7):
        meant = f": write options=ckpt.Options({close}=...)"
    return f"Checkpointer has no argument {name!r}{meant}"


# its type stays the dataclass' own
setattr(Options, "__init__", answering(Options.__init__, _unknown_setting))  # noqa: B010


def unnamed(items: object) -> TypeError:
    """The error for what was passed as ``items=`` and gives no names."""
    return TypeError(
        f"items= is a dict of names and objects, got {an(items)}: write items={{'model': ...}}"
    )


def refuse_args(name: str, value: object, call: str) -> None:
    """Raises TypeError for an object of Orbax that wraps a tree for its own calls; ``call`` takes the tree itself."""
    if any(cls.__name__ == "CheckpointArgs" for cls in type(value).__mro__):
        what = f"{an(value)} of Orbax, and here a tree or an object is passed as it is"
        raise TypeError(f"{name} is {what}: write {call}")


def refuse_arguments(
    names: Iterable[str], arguments: Iterable[str], cutoff: float, *, beside_a_state: bool = False
) -> None:
    """TypeError for a name of an item that is, or resembles by ``cutoff`` (0 to 1), a setting or an argument of this or another
    call. ``arguments`` are those of this one; ``beside_a_state``: an unnamed state was passed, too, and would need a name.
    """
    for name in names:
        if meant := _meant(name, arguments, cutoff):
            state = "'state': ..., " if beside_a_state else ""
            raise TypeError(
                f"{meant}; an item of this name is passed as items={{{state}{name!r}: ...}}"
            )


def _meant(name: str, arguments: Iterable[str], cutoff: float) -> str:
    """Which argument or setting a name is, or resembles, and where it goes; empty if it is like none."""
    if name in _SETTINGS:
        return (
            f"{name}= is a setting, and no item: pass options=ckpt.Options({name}=...) to ckpt.save or "
            "ckpt.Checkpointer(...)"
        )
    if name in CHECKPOINTER_ARGUMENTS:
        return f"{name}= is an argument of ckpt.Checkpointer(...), and no item: pass it there"
    close = nearest(name, arguments, cutoff)
    if close == name:  # the called function has it under no name, or it would not be here
        owner = _OWNERS.get(name, "another call")
        return f"{name}= is an argument of {owner}, and not of this one: pass it there"
    if close:
        return f"{name!r} looks like the argument {close!r}: write {close}=..."
    if close := nearest(name, RESTORE_ARGUMENTS, 0.9):
        return (
            f"{name!r} looks like the argument {close!r} of restore and load, and a save has none: pass "
            f"{close}=... there"
        )
    if close := nearest(name, _SETTINGS, 0.9):
        return f"{name!r} looks like the setting {close!r}: pass options=ckpt.Options({close}=...)"
    return ""
