"""What most often goes wrong where checkpoints are to be: measures it, and has a sentence for each thing."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib import metadata
from itertools import zip_longest
from pathlib import PurePath
from typing import Literal

from ckpt_core import _directory
from ckpt_core._directory import hidden_names
from ckpt_core._platform import ROOTS, WINDOWS
from ckpt_core._storage import Location, open_keys
from ckpt_core._words import size

DISTRIBUTION = "ckpt-core"
_OTHERS = ("jaxlib", "orbax-checkpoint", "safetensors", "equinox", "h5py")
_FLOOR = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*>=\s*([0-9][0-9.]*)")
_EXTRAS = re.compile(r"extra == ['\"](flax|keras|torchax|grain)['\"]")
_LOW_INODES = 10_000
_SLOW_SYNC_SECS = 0.1
_SLOW_BYTES_PER_SEC = 50e6
_SLOW_REQUEST_SECS = 0.5
_CLOCK_SECS = 2.0
_NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"}
    | {"ocfs2", "smb3", "virtiofs", "wekafs"}
)


@dataclass(frozen=True)
class Finding:
    """One sentence about a machine: what was found, and what to do."""

    # a problem: saves or restores fail, or can lose something
    level: Literal["problem", "note"]
    about: str  # versions, disk, place, store, clock, locks or writers
    text: str


_note, _problem = partial(Finding, "note"), partial(Finding, "problem")


def floors() -> dict[str, str]:
    """Oldest version of each package that this one works with, by its metadata, if it is installed."""
    try:
        asked = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    lines = (line for line in asked if "extra" not in line or _EXTRAS.search(line))
    found = filter(None, map(_FLOOR.match, lines))
    return {floor[1].lower().replace("_", "-"): floor[2] for floor in found}


def installed() -> dict[str, str]:
    """Versions of the packages that matter, as far as they are installed."""
    found: dict[str, str] = {}
    for name in (DISTRIBUTION, *floors(), *_OTHERS):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def is_older(version: str, floor: str) -> bool:
    """Whether a version is below a floor, by their leading numbers; ``2`` and ``2.0`` are one version."""
    leading = (re.split("[^0-9.]", one)[0] for one in (version, floor))
    have, wanted = (map(int, re.findall("[0-9]+", one)) for one in leading)
    pairs = zip_longest(have, wanted, fillvalue=0)
    return next((one < other for one, other in pairs if one != other), False)


def of_versions(installed: Mapping[str, str], floors: Mapping[str, str]) -> Iterator[Finding]:
    """Packages that are too old, and pairs that do not work together."""
    for name, floor in floors.items():
        if (have := installed.get(name)) and is_older(have, floor):
            text = f"{name} {have} is older than {floor}: pip install -U {name}"
            yield _problem("versions", text)
    jax, jaxlib = installed.get("jax"), installed.get("jaxlib")
    if jax and jaxlib and is_older(jax, jaxlib):
        text = f"jaxlib {jaxlib} is newer than jax {jax}, which does not import it: install both at one version"
        yield _problem("versions", text)
    torch = installed.get("torch")
    if torch and installed.get("torchax") == "0.0.13" and not is_older(torch, "2.13"):
        text = (
            f"torchax 0.0.13 cannot be imported with torch {torch}: call ckpt_torchax.shim.install() before it, or "
            "install torch<2.13"
        )
        yield _note("versions", text)


def of_disk(disk: Disk, step_bytes: int) -> Iterator[Finding]:
    """What a file system lacks for steps of this size."""
    if WINDOWS:
        text = "on Windows, checkpoints in directories are read, and saved to object stores only (s3://, gs://)"
        yield _note("disk", text)
    else:
        yield from _of_posix(disk, step_bytes)
    if abs(ahead_secs := disk.clock_ahead_secs) > _CLOCK_SECS:
        where = f"{abs(ahead_secs):.0f} s {'ahead of' if ahead_secs > 0 else 'behind'}"
        text = "the age of other machines' unfinished saves is misjudged by that; synchronize them (NTP)"
        yield _problem("clock", f"the file system's clock is {where} this machine's: {text}")


def _of_posix(disk: Disk, step_bytes: int) -> Iterator[Finding]:
    if disk.free_bytes is not None and disk.free_bytes < step_bytes:
        yield _problem("disk", f"{size(disk.free_bytes)} are free: saves will fail")
    if disk.free_inodes is not None and disk.free_inodes < _LOW_INODES:
        yield _problem("disk", f"{disk.free_inodes} more files can be made: saves will fail")
    if text := _of_kind(disk):
        yield _note("disk", text)
    if disk.sync_secs > _SLOW_SYNC_SECS:
        text = f"an fsync takes {disk.sync_secs:.2f} s: each save waits for a few of them, in the background"
        yield _note("disk", text)
    if disk.write_bytes_per_sec < _SLOW_BYTES_PER_SEC:
        text = f"one file is written at {size(disk.write_bytes_per_sec)}/s: saves of large states will last"
        yield _note("disk", f"{text}; see Options(compression=) and local_directory=")
    if not disk.hard_links:
        text = "no hard links: files that did not change are written again in each step"
        yield _note("disk", text)
    if not disk.exchanges:
        text = "no atomic exchange of directories: overwrite=True renames twice, and clean-up ends what was cut between"
        yield _note("disk", text)
    if not disk.locks:
        text = "a second lock of one file is granted: nothing here keeps two writers apart, or a deletion from a reader"
        yield _problem("locks", f"{text}. Let one job write to one directory")


def _of_kind(disk: Disk) -> str:
    """What is to be known of a file system of this kind."""
    if mount := disk.mounted_by:
        return f"a bucket that {mount} mounts: its URL (gs:// or s3://) is safer and faster"
    if disk.file_system in ("tmpfs", "ramfs"):
        return "in memory: nothing here outlives a restart of the machine"
    if disk.file_system in _NETWORK or disk.file_system.startswith("fuse"):
        return (
            f"{disk.file_system} is reached over a network: files are not memory-mapped, and whether an fsync lasts is "
            "the server's promise"
        )
    if disk.file_system:
        return ""
    return (
        "the kind of the file system is not known here: files are read instead of memory-mapped, and a bucket "
        "that is mounted as a directory may be taken for a disk; use its URL (gs:// or s3://)"
    )


def of_store(store: Store) -> Iterator[Finding]:
    """What a place in a bucket lacks."""
    if not store.conditions:
        text = (
            "it ignores conditional puts (If-None-Match): if two programs ever write one step there, an acknowledged "
            "checkpoint can be lost. See to it that only one does"
        )
        yield _problem("store", text)
    slowest = max(store.put_secs, store.get_secs)
    if slowest > _SLOW_REQUEST_SECS:
        text = f"a request takes {slowest:.2f} s, and a save 16 of them after each other: is the bucket in this region?"
        yield _note("store", text)


def of_missing(path: str, measured: str) -> Iterator[Finding]:
    """A note about a directory that does not exist, for which another one was measured."""
    if not os.path.exists(path):
        parent, name = os.path.split(path)
        beside = os.listdir(parent) if os.path.isdir(parent) else []
        near = "".join(f"; beside it is {one}" for one in get_close_matches(name, beside, n=1))
        yield _note("place", f"{path} does not exist, so what was measured is {measured}{near}")


def of_directory(
    traces: Iterable[_directory.Trace], garbage: Sequence[str], strays: Iterable[str], path: str
) -> Iterator[Finding]:
    """Who writes to a directory, what the dead left in it, and its steps of another history."""
    for trace in traces:
        if trace.kind == "writer":
            who = trace.whose or "a process"
            text = f"{who} is writing to it: a second writer takes the directory over, and the saves of this one then fail"
            yield _note("writers", text)
    if garbage:
        text = f"{len(garbage)} left by writers that have ended: ckpt gc {shlex.quote(path)} (the next save deletes them, too)"
        yield _note("writers", text)
    advice = "`ckpt cp --mirror ORIGINAL COPY` makes the copy hold one history; or restore the step to go on from, by its number"
    for text in strays:
        yield _problem("steps", f"{text}: {advice}")


_REQUESTS = 5
_SYNCS = 9
_BLOCK_BYTES = 2**22


@dataclass(frozen=True)
class Disk:
    """What a directory of a file system can do."""

    directory: str  # or the first one above it that exists and is in no checkpoint
    file_system: str  # type, as the kernel names it; empty if unknown
    mounted_by: str | None  # the program that mounts a bucket there
    free_bytes: int | None  # for this user, as the inodes; None if the file system does not say
    free_inodes: int | None
    write_bytes_per_sec: float  # of one file, with its fsync
    read_bytes_per_sec: float  # of the same file, past the page cache where the system allows it
    reads_cached: bool
    sync_secs: float  # median of an fsync after 4 KiB
    clock_ahead_secs: float  # the file system's clock minus this machine's
    hard_links: bool
    exchanges: bool  # of two directories, at once
    locks: bool  # it refuses a second lock of a file


@dataclass(frozen=True)
class Store:
    """What a place in a bucket can do."""

    url: str
    put_secs: float  # median of requests for 1 KiB, as of get_secs
    get_secs: float
    write_bytes_per_sec: float  # of one object, by one connection; reads as well
    read_bytes_per_sec: float
    conditions: bool  # a put that must not replace is refused where an object is


def probe(path: str, local: bool, probe_bytes: int) -> Disk | Store:
    """Measures a place, or the first above it that is in no checkpoint, with one file of ``probe_bytes``."""
    if path.startswith(ROOTS):
        return _probe_disk(path, probe_bytes)
    return _probe_store(_outside(Location(path, local)), probe_bytes)


def _probe_disk(path: str, probe_bytes: int) -> Disk:
    for around in (path, *map(str, PurePath(path).parents)):
        if _directory.has_sign(around) or not os.path.isdir(around):
            path = os.path.dirname(around)
    free_bytes, free_inodes = _free(path)
    # named as an unfinished save of this process: if it is killed here, the next clean-up deletes it
    folder = hidden_names.make(hidden_names.TEMPORARY, path, "doctor")
    os.mkdir(folder)
    try:
        file, small, *swapped = (f"{folder}/{name}" for name in ("speed", "small", "1", "2"))
        for name in swapped:
            os.mkdir(name)
        write_secs = _secs(lambda: _write(file, probe_bytes))
        cached = not _forget(file)
        read_secs = _secs(lambda: _read(file))
        sync_secs = statistics.median(_secs(lambda: _write(small, 4096)) for _ in range(_SYNCS))
        return Disk(
            directory=path,
            file_system=_directory.file_system_of(path),
            mounted_by=_directory.mounted_bucket(path),
            free_bytes=free_bytes,
            free_inodes=free_inodes,
            write_bytes_per_sec=probe_bytes / write_secs,
            read_bytes_per_sec=probe_bytes / read_secs,
            reads_cached=cached,
            sync_secs=sync_secs,
            clock_ahead_secs=os.stat(small).st_mtime - time.time(),
            hard_links=_works(lambda: os.link(file, f"{file}.link")),
            exchanges=_works(lambda: _directory.exchange(*swapped)),
            locks=_directory.locks_work_in(folder),
        )
    finally:
        _directory.remove(folder)


def _free(path: str) -> tuple[int | None, int | None]:
    """Free bytes and inodes for this user; None where the file system does not say."""
    room = shutil.disk_usage(path)
    files = os.statvfs(path) if hasattr(os, "statvfs") else None  # Windows has none
    inodes = files.f_favail if files is not None and files.f_files else None
    return room.free if room.total else None, inodes


def _write(path: str, count: int) -> None:
    block = os.urandom(min(count, _BLOCK_BYTES))
    with open(path, "wb", buffering=0) as file:
        left = count
        while left > 0:
            left -= file.write(block[:left])
        _directory.sync_file(file.fileno())


def _forget(path: str) -> bool:
    """Takes a file out of the page cache; whether the system knows how. A RAM disk keeps it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return _directory.file_system_of(path) not in ("tmpfs", "ramfs")


def _read(path: str) -> None:
    buffer = bytearray(_BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _works(call: Callable[[], object]) -> bool:
    with contextlib.suppress(OSError):
        return call() is not False
    return False


def _probe_store(location: Location, probe_bytes: int) -> Store:
    keys = open_keys(location)
    small, large = (f".ckpt-doctor.{secrets.token_hex(8)}.{n}" for n in range(2))
    try:
        _, missing = keys.get_version(small)
        puts = [_secs(lambda: keys.put(small, b"x" * 1024)) for _ in range(_REQUESTS)]
        gets = [_secs(lambda: keys.get(small)) for _ in range(_REQUESTS)]
        replaced = keys.put_if_unchanged(small, b"y", missing)
        data = secrets.token_bytes(probe_bytes)
        return Store(
            url=location.path,
            put_secs=statistics.median(puts),
            get_secs=statistics.median(gets),
            write_bytes_per_sec=probe_bytes / _secs(lambda: keys.put(large, data)),
            read_bytes_per_sec=probe_bytes / _secs(lambda: keys.get(large)),
            conditions=not replaced,
        )
    finally:
        with contextlib.suppress(Exception):
            keys.delete([small, large])


def _outside(location: Location) -> Location:
    """The location, or the one around the checkpoint in which it lies."""
    outside, parts = location, location.path.split("/")
    for count in range(len(parts), 3, -1):  # down to the bucket: scheme, nothing, name
        keys = open_keys(replace(location, path="/".join(parts[:count])))
        if any(keys.get(sign, first_bytes=1) is not None for sign in _directory.SIGNS):
            outside = replace(location, path="/".join(parts[: count - 1]))
    return outside


def copy_bytes_per_sec(probe_bytes: int) -> float:
    """Speed at which one thread copies into memory that it used before, as a snapshot on the host does."""
    source, target = bytes(probe_bytes), bytearray(probe_bytes)

    def copy() -> None:
        target[:] = source

    copy()  # faults the pages in
    return probe_bytes / statistics.median(_secs(copy) for _ in range(_REQUESTS))


def _secs(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return max(time.perf_counter() - began, 1e-9)
