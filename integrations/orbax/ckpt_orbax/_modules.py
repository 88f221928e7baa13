"""Modules that have another name in Orbax, for the two APIs to pass on."""

from ckpt_orbax import _checkpointables as handlers
from ckpt_orbax import _errors as errors
from ckpt_orbax import _leaves as arrays
from ckpt_orbax import _lone_names as emergency
from ckpt_orbax import _lone_names as pathways
from ckpt_orbax import _lone_names as test_utils
from ckpt_orbax import checkpoint_managers as preservation_policies
from ckpt_orbax import checkpoint_managers as save_decision_policies
from ckpt_orbax import handlers as checkpoint_args
from ckpt_orbax import tree as transform_utils

__all__ = [
    "arrays",
    "checkpoint_args",
    "emergency",
    "errors",
    "handlers",
    "pathways",
    "preservation_policies",
    "save_decision_policies",
    "test_utils",
    "transform_utils",
]
