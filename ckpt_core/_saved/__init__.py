"""A checkpoint whose metadata was read, and its items: ours, Orbax's, and files of other formats."""

from ckpt_core._saved.checkpoint import (
    MOST_TRIES,
    Checkpoint,
    DerivedItem,
    ExtentItem,
    NativeCheckpoint,
    NativeItem,
    OrbaxItem,
    Replaced,
    SavedItem,
    naming,
    replaced,
    with_path,
)
from ckpt_core._saved.opening import open_checkpoint, open_in, refuse_file_for_steps
