"""Which handler takes which arguments."""

from ckpt_orbax.v0._registration import (
    CheckpointArgs,
    get_registered_args_cls,
    get_registered_handler_cls,
    has_registered_args,
    register_with_handler,
)
from ckpt_orbax.v0.handlers import CheckpointHandler

__all__ = [
    "CheckpointArgs",
    "CheckpointHandler",
    "get_registered_args_cls",
    "get_registered_handler_cls",
    "has_registered_args",
    "register_with_handler",
]
