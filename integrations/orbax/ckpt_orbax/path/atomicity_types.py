"""How Orbax commits; ckpt commits by one rename, or on object stores by one small object."""

from ckpt_orbax.v0.utils import TMP_DIR_SUFFIX

COMMIT_SUCCESS_FILE = "commit_success.txt"
"""File with which Orbax commits where it cannot rename."""


class TemporaryPath:
    """Base of Orbax's ways to commit, for annotations and ``temporary_path_class=``, of no effect."""


class ValidationError(ValueError):
    """Of Orbax's ways to commit; ckpt does not raise it."""


__all__ = ["COMMIT_SUCCESS_FILE", "TMP_DIR_SUFFIX", "TemporaryPath", "ValidationError"]
