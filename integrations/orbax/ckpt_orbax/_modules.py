"""Modules that have another name in Orbax, for the two APIs to pass on."""

from ckpt_orbax import (
    _checkpointables as handlers,
    _errors as errors,
    _leaves as arrays,
    _lone_names as emergency,
    _lone_names as pathways,
    _lone_names as test_utils,
    checkpoint_managers as preservation_policies,
    checkpoint_managers as save_decision_policies,
    handlers as checkpoint_args,
    tree as transform_utils,
)

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
