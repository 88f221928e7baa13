"""Flax NNX for ckpt: modules, optimizers, random streams and metrics, restored in place.

Saving and restoring needs no import of this package: ``ckpt_core`` finds ``ADAPTER`` by itself when
it meets an NNX object. Two functions are for the user:

``abstract(make, mesh)``
    what ``make()`` would return, as shapes and shardings: a target to restore into.
``restore_or_init(checkpointer, make)``
    the latest checkpoint on the devices, or a fresh start, each with one peak of memory.
"""

from ckpt_flax_nnx._abstract import abstract, restore_or_init
from ckpt_flax_nnx._adapter import ADAPTER, NNXAdapter

__all__ = ["ADAPTER", "NNXAdapter", "abstract", "restore_or_init"]
