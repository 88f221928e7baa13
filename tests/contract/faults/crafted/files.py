"""Files that are not files: pipes, links, directories."""

import os
from pathlib import Path

from tests.contract.faults.crafted.case import SECRET, Case

_NEEDED = ("ckpt.json", "state/manifest.ocdbt")  # a load reads these, the rest is for Orbax


def _pipe(name: str) -> Case:
    """Opening a pipe that nobody writes to blocks for ever."""

    def make(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return Case(f"pipe-{name}", make, name not in _NEEDED, found=True)


def _link(name: str, target: str) -> Case:
    def make(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(target)

    return Case(f"link-{name}-{Path(target).name}", make, name not in _NEEDED, found=True)


def _directory_as_file(name: str) -> Case:
    def make(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return Case(f"directory-{name}", make, name not in _NEEDED, found=True)


def _item_link(path: Path) -> None:
    """The item is a link to a directory outside."""
    outside = path.parent / "outside" / f"state-of-{path.name}"
    (path / "state").rename(outside)
    (path / "state").symlink_to(outside)


def _data_link(path: Path) -> None:
    """A data file is a link to a file outside; its size fits."""
    file = max((path / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    size = file.stat().st_size
    outside = path.parent / "outside" / f"data-of-{path.name}"
    outside.write_bytes((SECRET * (size // len(SECRET) + 1))[:size])
    file.unlink()
    file.symlink_to(outside)


def _loop(path: Path) -> None:
    (path / "loop").symlink_to(path)
    (path / "state" / "loop").symlink_to(path)


FILE_CASES = [
    *(
        _pipe(name)
        for name in ("ckpt.json", "_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt")
    ),
    *(
        _link(name, "/dev/zero")
        for name in ("ckpt.json", "_CHECKPOINT_METADATA", "state/_METADATA")
    ),
    *(
        _link(name, "/etc/passwd")
        for name in ("ckpt.json", "state/_METADATA", "state/manifest.ocdbt")
    ),
    *(
        _directory_as_file(name)
        for name in ("ckpt.json", "_CHECKPOINT_METADATA", "state/manifest.ocdbt")
    ),
    Case("link-item", _item_link, may_load=True),
    Case("link-data", _data_link),
    Case("link-loop", _loop, may_load=True),
]
