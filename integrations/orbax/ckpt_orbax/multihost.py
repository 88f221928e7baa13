"""The functions of Orbax's ``multihost`` that clients call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax import process_count as process_count, process_index as process_index
from jax.experimental import multihost_utils

from ckpt_orbax._refused import not_offered

is_jax_distributed_client_initialized = jax.distributed.is_initialized


def is_primary_host(primary_host: int | None) -> bool:
    """Whether this process is ``primary_host``; True in every process for None."""
    return primary_host is None or primary_host == process_index()


def sync_global_processes(
    name: str, *, timeout: int | None = None, processes: Collection[int] | None = None, **_: Any
) -> None:
    """Blocks until all processes have come to the call of this name; NotOffered if ``processes`` names only some."""
    if processes is not None and len(set(processes)) != process_count():
        what, why = "sync_global_processes(processes=)", "all processes take part in a checkpoint"
        raise not_offered(what, why, "call it in all of them, without processes=")
    if process_count() > 1:
        multihost_utils.sync_global_devices(name)


def broadcast_one_to_all(in_tree: Any, is_source: bool | None = None) -> Any:
    """``in_tree`` of the source process (0 by default), in all processes."""
    if process_count() == 1:
        return in_tree
    return multihost_utils.broadcast_one_to_all(in_tree, is_source=is_source)


def fully_replicated_host_local_array_to_global_array(arr: jax.Array) -> jax.Array:
    """An array that each process has whole, as one over all devices; ``utils`` has it in Orbax."""
    whole = np.asarray(arr.addressable_data(0))
    if whole.shape != arr.shape:  # of pmap: one copy for each device, in the first dimension
        whole = whole[0]
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.make_array_from_callback(whole.shape, everywhere, lambda index: whole[index])


def reached_preemption(step: int) -> bool:
    """Whether jax's preemption service says to save this step and stop; False without it."""
    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError:
        return False
