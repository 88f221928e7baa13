"""Grain for ckpt: the position of a data pipeline, saved with the model and restored in place.

Saving and restoring needs no import of this package: ``ckpt_core`` loads ``ADAPTER`` when
it meets a Grain iterator. Two functions are for the user:

``ignore_pipeline_changes(iterator)``
    restore into a pipeline that differs from the saved one.
``with_proof(iterator)``
    have every restore check that the next element is the one that the saved run would have seen.
"""

try:
    from ckpt_grain._adapter import ADAPTER, GrainAdapter, ignore_pipeline_changes, with_proof
except ModuleNotFoundError as error:
    _missing = (error.name or "").partition(".")[0]
    if _missing != "grain":
        raise
    raise ModuleNotFoundError(
        f"ckpt_grain needs {_missing}: pip install 'ckpt-core[grain]'", name=_missing
    ) from error

__all__ = ["ADAPTER", "GrainAdapter", "ignore_pipeline_changes", "with_proof"]
