"""What each file of a checkpoint directory is for."""

from __future__ import annotations

import re
from typing import NamedTuple

from ckpt_core._directory import PosixBackend

# The first matching pattern explains a path. Order matters: the general patterns come last.
_EXPLAINED = r"""
ckpt\.json$                                ckpt's record: items, leaves, files with sizes and digests; written last
_CHECKPOINT_METADATA$                      what Orbax needs to know of the items, and the user's metadata
commit_success\.txt$                       a marker: for Orbax's readers the save was committed
(.*/)?checksums/process_\d+$               crc32c of every block of every array of this process
(.*/)?array_metadatas/process_\d+$         shapes of the pieces that this process wrote
(.*/)?ocdbt\.linked/\d+/                   what did not change since an earlier step, shared with it by hard links
(.*/)?ocdbt\.process_\d+/manifest\.ocdbt$  index of what this process wrote
(.*/)?ocdbt\.process_\d+/d/                data of this process: chunks of arrays, many to a file
(.*/)?manifest\.ocdbt$                     index of the item: finds every chunk of every array (OCDBT)
(.*/)?d/                                   data: chunks of arrays and nodes of the index, many to a file
(.*/)?_METADATA$                           the tree: path, type and kind of every leaf, as Orbax writes it
(.*/)?_sharding$                           how each array lay on its devices
(.*/)?_strings\.json$                      leaves that are text
(.*/)?descriptor/                          Orbax's note of who wrote it
(.*/)?orbax\.checkpoint$                   Orbax's mark of a checkpoint that is its own
metrics/metrics$                           metrics of the step, where Orbax's best_step looks
(.*/)?exact/                               the same state with its exact types
(.*/)?process_\d+-of-\d+\.json$            state of one process: an iterator's position
(.*/)?data\.json$                          plain values, in Orbax's Json form
(.*/)?(zarr\.json|\.zarray|\.zattrs)$      shape, dtype and chunks of one array (Zarr)
(.*/)?c(/\d+)+$                            one chunk of one array (Zarr)
[^/]+/metadata$                            what the item is, and of how many processes
(.*/)?_rng_metadata|.*random.*             a random key
"""
_PURPOSES = [
    (re.compile(pattern), text) for pattern, text in re.findall(r"(\S+) +(.+)", _EXPLAINED)
]


class Part(NamedTuple):
    """Files with the same purpose: name, number, size and purpose."""

    name: str
    files: int
    bytes: int
    purpose: str


def anatomy(path: str) -> list[Part]:
    """The files of a directory and their purpose, grouped, in the order of paths."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for name, size in sorted(PosixBackend().files(path).items()):
        directory, _, _ = name.rpartition("/")
        # Data files have random names: one line for all files of a folder.
        shown = f"{directory}/" if directory.rpartition("/")[2] in ("d", "checksums") else name
        purposes = (text for pattern, text in _PURPOSES if pattern.match(name))
        sizes.setdefault((shown, next(purposes, "unknown to ckpt")), []).append(size)
    return [Part(name, len(found), sum(found), purpose) for (name, purpose), found in sizes.items()]
