"""Results of loads, restores, ``inspect`` and ``verify``, and how they show themselves in a notebook."""

from ckpt_core._results.records import CheckpointInfo as CheckpointInfo
from ckpt_core._results.records import ItemInfo as ItemInfo
from ckpt_core._results.records import LeafInfo as LeafInfo
from ckpt_core._results.records import Problem as Problem
from ckpt_core._results.records import Restored as Restored
from ckpt_core._results.records import RestoredStep as RestoredStep
from ckpt_core._results.records import RestoreReport as RestoreReport
from ckpt_core._results.records import VerifyReport as VerifyReport
