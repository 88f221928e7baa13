"""Flax NNX for ckpt: modules, optimizers, random streams and metrics, restored in place.

Saving and restoring needs no import of this package: ``ckpt_core`` loads ``ADAPTER`` when
it meets an NNX object. Three functions are for the user:

``abstract(make, mesh)``
    the result of ``make()`` with shapes and shardings in place of arrays: a target to restore into.
``restore_or_init(checkpointer, make)``
    the latest checkpoint on the devices, or a new state; memory never holds the state twice.
``like_params(state, params)``
    the shapes of an Optax state, with the shardings of the parameters.
"""

try:
    from ckpt_flax_nnx._abstract import abstract, like_params, restore_or_init
    from ckpt_flax_nnx._adapter import ADAPTER, NNXAdapter
except ModuleNotFoundError as error:
    _missing = (error.name or "").partition(".")[0]
    if _missing not in ("flax", "optax"):
        raise
    raise ModuleNotFoundError(
        f"ckpt_flax_nnx needs {_missing}: pip install 'ckpt-core[flax]'", name=_missing
    ) from error

__all__ = ["ADAPTER", "NNXAdapter", "abstract", "like_params", "restore_or_init"]
