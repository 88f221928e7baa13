"""Names for ``temporary_path_class=``, which has no effect: ckpt's commits are atomic everywhere."""

from ckpt_orbax.path.atomicity_types import (
    COMMIT_SUCCESS_FILE,
    TMP_DIR_SUFFIX,
    TemporaryPath,
    ValidationError,
)


class AtomicRenameTemporaryPath(TemporaryPath):
    """Commit by a rename."""


class CommitFileTemporaryPath(TemporaryPath):
    """Commit by a file."""


class ReadOnlyTemporaryPath(TemporaryPath):
    """No commit."""


__all__ = [
    "COMMIT_SUCCESS_FILE",
    "TMP_DIR_SUFFIX",
    "AtomicRenameTemporaryPath",
    "CommitFileTemporaryPath",
    "ReadOnlyTemporaryPath",
    "TemporaryPath",
    "ValidationError",
]
