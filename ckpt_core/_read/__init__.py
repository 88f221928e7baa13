"""Stored arrays into host memory, verified: ``pipeline`` reads ahead, by the readers of ``extents`` and ``orbax``."""

from ckpt_core._read.broadcast import read_and_send
from ckpt_core._read.orbax import read_special, with_specs
from ckpt_core._read.pipeline import read_leaves
from ckpt_core._read.wants import Array, Parts, Reading, Want
