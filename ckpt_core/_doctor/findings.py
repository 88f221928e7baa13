"""What installed versions and measurements mean: a sentence for each thing that is wrong, or that one should know."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import metadata
from typing import Literal

from ckpt_core._directory import Trace
from ckpt_core._doctor.probes import Disk, Store
from ckpt_core._platform import WINDOWS
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
    """Oldest version of each package that this one works with, by its own metadata; empty if it is not installed."""
    try:
        asked = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for line in asked:
        if ("extra" not in line or _EXTRAS.search(line)) and (floor := _FLOOR.match(line)):
            found[floor[1].lower().replace("_", "-")] = floor[2]
    return found


def installed() -> dict[str, str]:
    """Versions of the packages that matter, as far as they are installed."""
    found: dict[str, str] = {}
    for name in (DISTRIBUTION, *floors(), *_OTHERS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without zeros at the end: ``0.12.0rc1`` is ``(0, 12)``."""
    leading = re.match(r"[0-9.]*", version)
    found = [int(part) for part in re.findall("[0-9]+", leading[0] if leading else "")]
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


def is_older(version: str, floor: str) -> bool:
    """Whether a version is below a floor; ``2`` and ``2.0`` are one version."""
    return numbers(version) < numbers(floor)


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
    if torch and installed.get("torchax") == "0.0.13" and numbers(torch) >= (2, 13):
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
        yield from _of_clock(disk.clock_ahead_secs)
        return
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
    yield from _of_clock(disk.clock_ahead_secs)


def _of_kind(disk: Disk) -> str:
    """What is to be known of a file system of this kind."""
    if disk.mounted_by is not None:
        return (
            f"a bucket that {disk.mounted_by} mounts: its URL (gs:// or s3://) is safer and faster"
        )
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


def _of_clock(ahead_secs: float) -> Iterator[Finding]:
    if abs(ahead_secs) > _CLOCK_SECS:
        where = f"{abs(ahead_secs):.0f} s {'ahead of' if ahead_secs > 0 else 'behind'}"
        text = (
            f"the file system's clock is {where} this machine's: the age of other machines' unfinished saves is misjudged "
            "by that; synchronize them (NTP)"
        )
        yield _problem("clock", text)


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
    """What is said of a directory that does not exist, in whose place another one was measured."""
    if not os.path.exists(path):
        parent, name = os.path.split(path)
        beside = os.listdir(parent) if os.path.isdir(parent) else []
        near = "".join(f"; beside it is {one}" for one in get_close_matches(name, beside, n=1))
        text = f"{path} does not exist, so what was measured is {measured}{near}"
        yield _note("place", text)


def of_directory(
    traces: Iterable[Trace], garbage: Sequence[str], strays: Iterable[str], path: str
) -> Iterator[Finding]:
    """Who writes to a directory, what the dead left in it, and its steps of another history, in a sentence each."""
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
