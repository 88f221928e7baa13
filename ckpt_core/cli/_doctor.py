"""``ckpt doctor``."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import secrets
import sys
import textwrap
from dataclasses import asdict
from typing import Any

import numpy as np

from ckpt_core import _doctor
from ckpt_core._directory import resolve, traces
from ckpt_core._errors import CheckpointError
from ckpt_core._load import load
from ckpt_core._options import MIB
from ckpt_core._platform import ROOTS, WINDOWS
from ckpt_core._run.lease import OWNER_FILE
from ckpt_core._save import save
from ckpt_core._saved import refuse_file_for_steps
from ckpt_core._storage import backend_of
from ckpt_core._words import pairs, size
from ckpt_core.cli._shared import console, one_line, print_json
from ckpt_core.cli._steps import steps_in, strays_as_text


def doctor(directory: str, *, devices: bool, mib: int, step_bytes: int, as_json: bool) -> int:
    """Prints what was measured and found, and how many steps fit; returns 1 if there is a problem."""
    text, local = resolve(directory)
    versions = _doctor.installed()
    place, findings = _place(text, local, mib * MIB, step_bytes)
    findings = [*_doctor.of_versions(versions, _doctor.floors()), *findings]
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "versions": versions,
    }
    if devices:
        import jax

        facts["devices"] = [f"{one.platform} {one.id}: {one.device_kind}" for one in jax.devices()]
    if as_json:
        measured = None if place is None else asdict(place)
        print_json({**facts, "place": measured, "findings": list(map(asdict, findings))})
    else:
        _print(facts, place, findings, step_bytes)
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def _place(
    path: str, local: bool, probe_bytes: int, step_bytes: int
) -> tuple[_doctor.Disk | _doctor.Store | None, list[_doctor.Finding]]:
    """What was measured where checkpoints are; None if it cannot be written to."""
    try:
        if local:
            refuse_file_for_steps(path)
        place = _doctor.probe(path, local, probe_bytes)
    except (OSError, CheckpointError) as error:
        about = "disk" if path.startswith(ROOTS) else "store"
        return None, [_doctor.Finding("problem", about, f"{path}: {error}")]
    here = isinstance(place, _doctor.Store) or os.path.isdir(path)
    if isinstance(place, _doctor.Disk):
        found = [*_doctor.of_disk(place, step_bytes), *_doctor.of_missing(path, place.directory)]
        found += [] if WINDOWS else _tried(place.directory)
        there = traces(path, OWNER_FILE, {}) if here else []
    else:
        found, there = [*_doctor.of_store(place), *_tried(place.url)], []
    garbage = backend_of(local).clean(path, only_look=True) if here else []
    strays = strays_as_text(steps_in(path).strays())
    return place, [*found, *_doctor.of_directory(there, garbage, strays, path)]


def _tried(directory: str) -> list[_doctor.Finding]:
    """A problem if no checkpoint can be saved, loaded and deleted there."""
    path = f"{directory}/.ckpt-doctor.{secrets.token_hex(8)}"
    try:
        save(path, {"x": np.arange(1024)})
        load(path, as_numpy=True)
    except (OSError, CheckpointError) as error:
        unsynced = isinstance(error, OSError) and error.errno == errno.EINVAL
        cure = ". Options(durable=False) saves there, and survives no power cut" if unsynced else ""
        return [_doctor.Finding("problem", "save", f"a save fails: {error}{cure}")]
    finally:
        with contextlib.suppress(OSError, CheckpointError):
            backend_of(resolve(path)[1]).delete(path)
    return []


def _print(
    facts: dict[str, Any],
    place: _doctor.Disk | _doctor.Store | None,
    findings: list[_doctor.Finding],
    step_bytes: int,
) -> None:
    width = console().width if sys.stdout.isatty() else sys.maxsize
    words = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    words.subsequent_indent = " " * 10

    def line(name: str, text: str) -> None:
        print(words.fill(f"{name:<10}{one_line(text)}"))

    line("system", f"{facts['system']}, {facts['cpus']} CPUs, Python {facts['python']}")
    line("packages", pairs(facts["versions"]))
    if "devices" in facts:
        line("devices", "; ".join(facts["devices"]))
    speed = ""
    if place is not None:
        write, read = size(place.write_bytes_per_sec), size(place.read_bytes_per_sec)
        speed = f"one file written at {write}/s, read at {read}/s"
    if isinstance(place, _doctor.Disk):
        room = "unknown"
        if place.free_bytes is not None:
            steps = place.free_bytes // step_bytes
            room = f"{size(place.free_bytes)} ({steps:,} steps of {size(step_bytes)})"
        kind = place.mounted_by or place.file_system or sys.platform
        inodes = "" if place.free_inodes is None else f", {place.free_inodes:,} inodes"
        line("disk", f"{place.directory}: {kind}, free: {room}{inodes}")
        cached = ", from memory" if place.reads_cached else ""
        line("speed", f"{speed}{cached}; fsync {place.sync_secs * 1e3:.1f} ms")
    elif place is not None:
        line("store", place.url)
        times = f"put {place.put_secs * 1e3:.1f} ms, get {place.get_secs * 1e3:.1f} ms"
        line("speed", f"{speed} by one connection; {times}")
    for finding in findings:
        line(finding.level, f"{finding.about}: {finding.text}")
    if not findings:
        line("result", "nothing wrong was found")
