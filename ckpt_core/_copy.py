"""Copies a checkpoint from one place to another: disk, S3, Google Cloud Storage."""

from __future__ import annotations

import os
import shlex
import zlib
from dataclasses import replace

from ckpt_core._directory import Attempt, resolve
from ckpt_core._errors import CheckpointCorrupt, CheckpointError
from ckpt_core._format.packed import pack
from ckpt_core._format.record import RECORD_FILE, dump_record
from ckpt_core._saved import NativeCheckpoint, open_checkpoint
from ckpt_core._storage import backend_of
from ckpt_core._verify import verify


def copy_checkpoint(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> int:
    """The number of bytes of a checkpoint that was copied, and verified before; it appears whole at ``target``, where nothing may
    be. The copy has the token of the source, so ``same_save`` knows it. One data file is in memory at a time.
    """
    opened = open_checkpoint(source)
    if not isinstance(opened, NativeCheckpoint):
        raise CheckpointError(
            f"{opened.path} was not written by ckpt and has no checksums, so nothing of a copy could be verified: "
            f"make a checkpoint of ckpt of it with `ckpt import {shlex.quote(opened.path)} {shlex.quote(os.fspath(target))}`, or "
            "copy the directory with another tool"
        )
    report = verify(source)
    if not report.ok:
        raise CheckpointCorrupt(f"{opened.path} was not copied: {report.problems[0]}")
    text, local = resolve(target)
    backend = backend_of(local)
    token = opened.record.token
    with backend.begin(text, overwrite=False, durable=True, token=token) as attempt:
        with opened.held():
            copied_bytes = sum(_copy_file(opened, name, attempt) for name in opened.record.files)
        small = attempt.small_files()
        record = replace(opened.record, packed=pack(small) if small else b"")
        attempt.make_durable(RECORD_FILE, dump_record(record))
        attempt.commit()
    return copied_bytes


def same_save(one: str, other: str) -> bool:
    """Whether two checkpoints come from one save, each whole as far as its record says; raises what ``load`` does if there is none."""
    both = [open_checkpoint(path) for path in (one, other)]
    known = all(isinstance(opened, NativeCheckpoint) for opened in both)
    return known and both[0].attempt == both[1].attempt


def _copy_file(opened: NativeCheckpoint, name: str, attempt: Attempt) -> int:
    """Copies one file; returns its size."""
    expected = opened.record.files[name]
    data = opened.read_unverified(name, expected.size_bytes)
    if (
        data is None
        or len(data) != expected.size_bytes
        or not (expected.data or zlib.crc32(data) == expected.crc32)
    ):
        raise CheckpointCorrupt(f"{opened.path}: {name} changed while it was copied", file=name)
    if "/d/" not in name or opened.record.is_users(name):
        attempt.write(name, data)
    else:  # its name is random, and no other save has it
        attempt.write_data(name, (data,))
    return len(data)
