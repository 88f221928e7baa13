"""Stored arrays into host memory, verified: reads ahead, by the readers of ``extents``, ``derived`` and ``orbax``."""

from ckpt_core._read.broadcast import read_and_send as read_and_send
from ckpt_core._read.orbax import read_special as read_special
from ckpt_core._read.orbax import with_specs as with_specs
from ckpt_core._read.pipeline import read_leaves as read_leaves
from ckpt_core._read.wants import Array as Array
from ckpt_core._read.wants import Reading as Reading
from ckpt_core._read.wants import Want as Want
