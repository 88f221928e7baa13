"""A checkpoint whose metadata was read, and its items: ours, Orbax's, and files of other formats."""

from ckpt_core._saved.checkpoint import MOST_TRIES as MOST_TRIES
from ckpt_core._saved.checkpoint import Checkpoint as Checkpoint
from ckpt_core._saved.checkpoint import DerivedItem as DerivedItem
from ckpt_core._saved.checkpoint import ExtentItem as ExtentItem
from ckpt_core._saved.checkpoint import NativeCheckpoint as NativeCheckpoint
from ckpt_core._saved.checkpoint import NativeItem as NativeItem
from ckpt_core._saved.checkpoint import OrbaxItem as OrbaxItem
from ckpt_core._saved.checkpoint import Replaced as Replaced
from ckpt_core._saved.checkpoint import SavedItem as SavedItem
from ckpt_core._saved.checkpoint import naming as naming
from ckpt_core._saved.checkpoint import replaced as replaced
from ckpt_core._saved.checkpoint import with_path as with_path
from ckpt_core._saved.opening import open_checkpoint as open_checkpoint
from ckpt_core._saved.opening import open_in as open_in
from ckpt_core._saved.opening import refuse_file_for_steps as refuse_file_for_steps
