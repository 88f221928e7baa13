"""Our record, read and signed again after a change."""

import json
import zlib
from pathlib import Path
from typing import Any

import crc32c

_HEAD = b'{"crc32c":"%08x","record":'


def read_record(path: Path) -> Any:
    data = (path / "ckpt.json").read_bytes()
    return json.loads(data)["record"]


def write_record(path: Path, record: Any) -> None:
    # as ckpt writes it, which is what its own parser takes; bytes are written as they please
    compact = record if isinstance(record, bytes) else json.dumps(record, separators=(",", ":"))
    body = compact if isinstance(compact, bytes) else compact.encode()
    (path / "ckpt.json").write_bytes(_HEAD % crc32c.crc32c(body) + body + b"}\n")


def sign(path: Path) -> None:
    """Makes sizes and digests of all files fit again, of new files too."""
    record = read_record(path)
    there = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    del there["ckpt.json"]
    for name, file in there.items():
        if not record["files"].get(name, [0, 0, 0])[2]:
            data = file.read_bytes()
            record["files"][name] = [len(data), zlib.crc32(data), 0]
    write_record(path, record)
