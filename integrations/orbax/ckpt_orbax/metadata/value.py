"""What a checkpoint says of single leaves."""

from ckpt_orbax.v0.metadata import (
    ArrayMetadata,
    Metadata,
    ScalarMetadata,
    StorageMetadata,
    StringMetadata,
)

__all__ = ["ArrayMetadata", "Metadata", "ScalarMetadata", "StorageMetadata", "StringMetadata"]
