"""Arguments of single leaves; handlers of their types are refused."""

from ckpt_orbax._leaves import PLACEHOLDER
from ckpt_orbax._refused import missing_name
from ckpt_orbax.v0.leaf_args import (
    ArrayRestoreArgs,
    RestoreArgs,
    SaveArgs,
    SingleReplicaArrayRestoreArgs,
)

__all__ = [
    "PLACEHOLDER",
    "ArrayRestoreArgs",
    "RestoreArgs",
    "SaveArgs",
    "SingleReplicaArrayRestoreArgs",
]


def __getattr__(name: str) -> object:
    raise missing_name("ckpt_orbax.type_handlers", name)
