"""What a checkpoint says of single leaves."""

from ckpt_orbax._refused import refusing
from ckpt_orbax.v0.metadata import (
    ArrayMetadata,
    Metadata,
    ScalarMetadata,
    StorageMetadata,
    StringMetadata,
)

__all__ = ["ArrayMetadata", "Metadata", "ScalarMetadata", "StorageMetadata", "StringMetadata"]

__getattr__ = refusing(__name__)
