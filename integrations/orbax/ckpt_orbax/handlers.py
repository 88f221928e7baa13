"""``ckpt_orbax.handlers``, for ``from ckpt_orbax.handlers import ...``; with the arguments under their names there."""

from ckpt_orbax.v0 import args as _args
from ckpt_orbax.v0 import handlers as _handlers
from ckpt_orbax.v0.handlers import *  # noqa: F403

ArrayRestoreArgs = _args.ArrayRestore
ArraySaveArgs = _args.ArraySave
CompositeArgs = CompositeResults = _args.Composite
JsonRestoreArgs = _args.JsonRestore
JsonSaveArgs = _args.JsonSave
PyTreeRestoreArgs = _args.PyTreeRestore
PyTreeSaveArgs = _args.PyTreeSave
StandardRestoreArgs = _args.StandardRestore
StandardSaveArgs = _args.StandardSave

__all__ = [
    "ArrayRestoreArgs",
    "ArraySaveArgs",
    "CompositeArgs",
    "CompositeResults",
    "JsonRestoreArgs",
    "JsonSaveArgs",
    "PyTreeRestoreArgs",
    "PyTreeSaveArgs",
    "StandardRestoreArgs",
    "StandardSaveArgs",
]
__all__ += _handlers.__all__
