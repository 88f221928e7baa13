"""Which process this is, and waiting for the others."""

from ckpt_orbax.multihost import (
    is_pathways_backend,
    is_primary_host,
    process_count,
    process_index,
    sync_global_processes,
)

__all__ = [
    "is_pathways_backend",
    "is_primary_host",
    "process_count",
    "process_index",
    "sync_global_processes",
]
