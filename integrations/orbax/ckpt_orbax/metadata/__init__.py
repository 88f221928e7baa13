"""What a checkpoint says of itself without its arrays."""

from ckpt_orbax.metadata import tree, value
from ckpt_orbax.v0.metadata import (
    ArrayMetadata,
    Metadata,
    RootMetadata,
    ScalarMetadata,
    ShardingMetadata,
    StepMetadata,
    StorageMetadata,
    StringMetadata,
    TreeMetadata,
    get_step_metadata,
)

__all__ = [
    "ArrayMetadata",
    "Metadata",
    "RootMetadata",
    "ScalarMetadata",
    "ShardingMetadata",
    "StepMetadata",
    "StorageMetadata",
    "StringMetadata",
    "TreeMetadata",
    "get_step_metadata",
    "tree",
    "value",
]
