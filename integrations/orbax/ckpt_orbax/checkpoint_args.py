"""Which handler takes which arguments; see ``handlers``."""

from ckpt_orbax.handlers import CheckpointArgs as CheckpointArgs
from ckpt_orbax.handlers import get_registered_args_cls as get_registered_args_cls
from ckpt_orbax.handlers import get_registered_handler_cls as get_registered_handler_cls
from ckpt_orbax.handlers import has_registered_args as has_registered_args
from ckpt_orbax.handlers import register_with_handler as register_with_handler
