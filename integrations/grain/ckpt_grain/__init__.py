"""Grain for ckpt: the position of a data pipeline, saved with the model and restored in place.

Saving and restoring needs no import of this package: ``ckpt_core`` finds ``ADAPTER`` by itself when
it meets a Grain iterator. One function is for the user:

``ignore_pipeline_changes(iterator)``
    restore into a pipeline that is not the one that was saved.
"""

from ckpt_grain._adapter import ADAPTER, GrainAdapter, ignore_pipeline_changes

__all__ = ["ADAPTER", "GrainAdapter", "ignore_pipeline_changes"]
