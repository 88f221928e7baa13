"""Options of saves and loads, under Orbax's names; ``v1._context`` says what becomes of each in a ``Context``."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from ckpt_orbax._checkpointables import local_registry
from ckpt_orbax._paths import path_type


def copied(settings: Any) -> Any:
    """Settings with independent copies of those inside of them."""
    inside = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    changes = {name: copied(one) for name, one in inside.items() if dataclasses.is_dataclass(one)}
    return dataclasses.replace(settings, **changes)


@dataclasses.dataclass(kw_only=True)
class AsyncOptions:
    """Asynchronous saves: how long processes wait for each other, and what is called at the end, in another thread.
    ``barrier_sync_fn`` is refused; directories are made when they are needed.
    """

    timeout_secs: int = 1200
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True
    barrier_sync_fn: Callable[..., Any] | None = None


@dataclasses.dataclass(kw_only=True)
class MultiprocessingOptions:
    """Which processes take part: all, and process 0 leads."""

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclasses.dataclass(kw_only=True)
class FileOptions:
    """Directories and files."""

    path_permission_mode: int | None = None
    path_class: Any = dataclasses.field(default_factory=path_type)
    skip_sync_file_validations: bool = False


@dataclasses.dataclass(kw_only=True)
class PyTreeOptions:
    """Loading of pytrees."""

    @dataclasses.dataclass(kw_only=True)
    class Loading:
        """Loading of pytrees; ``partial_load`` leaves out what the target does not name."""

        partial_load: bool = False

    loading: Loading = dataclasses.field(default_factory=Loading)


@dataclasses.dataclass(kw_only=True)
class ArrayOptions:
    """Saving and loading of arrays."""

    @dataclasses.dataclass(kw_only=True)
    class Saving:
        """Saving of arrays; ``scoped_storage_options_creator(key, value)`` gives a leaf's ``StorageOptions`` or None."""

        @dataclasses.dataclass(kw_only=True)
        class StorageOptions:
            """Storage of a leaf: ``dtype`` converts it; chunks and shards are ckpt's choice."""

            dtype: Any = None
            chunk_byte_size: int | None = None
            shard_axes: tuple[int, ...] | None = None

        storage_options: StorageOptions = dataclasses.field(default_factory=StorageOptions)
        use_ocdbt: bool = True
        use_zarr3: bool = True
        use_compression: bool = True
        ocdbt_target_data_file_size: int | None = None
        enable_pinned_host_transfer: bool | None = None
        enable_post_merge_validation: bool = True
        use_replica_parallel: bool | None = None
        min_slice_bytes_for_replica_parallel: int | None = None
        max_replicas_for_replica_parallel: int | None = None
        enable_replica_parallel_separate_folder: bool = False
        enable_write_sharding_file: bool = True
        array_metadata_store: Any = None
        scoped_storage_options_creator: Callable[[Any, Any], Any] | None = None

    @dataclasses.dataclass(kw_only=True)
    class Loading:
        """Loading of arrays; ``use_load_and_broadcast``: each region is read by one process."""

        @dataclasses.dataclass(kw_only=True)
        class LoadAndBroadcastOptions:
            """Which replica reads in Orbax; ckpt finds by itself who holds the same."""

            replica_axis_index: int | None = 0
            primary_replica_id: int | None = 0
            broadcast_memory_limit_bytes: int | None = None
            broadcast_memory_scaling_factor: float | None = 0.75

        enable_padding_and_truncation: bool = False
        raise_array_data_missing_error: bool = True
        use_load_and_broadcast: bool = False
        load_and_broadcast_options: LoadAndBroadcastOptions = dataclasses.field(
            default_factory=LoadAndBroadcastOptions
        )

    saving: Saving = dataclasses.field(default_factory=Saving)
    loading: Loading = dataclasses.field(default_factory=Loading)


@dataclasses.dataclass(kw_only=True)
class CheckpointablesOptions:
    """Which handler saves and loads which checkpointable."""

    registry: Any = dataclasses.field(default_factory=local_registry)


@dataclasses.dataclass(kw_only=True)
class PathwaysOptions:
    """Pathways, which ckpt does not support."""

    checkpointing_impl: Any = None


class CheckpointLayout(enum.Enum):
    """The layout of a directory; ckpt finds out by itself which of Orbax's it is."""

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"
    AUTO = "auto"
