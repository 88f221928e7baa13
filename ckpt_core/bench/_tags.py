"""Maps events of jax, Orbax and ckpt to metrics; the leading numbers sort them in TensorBoard."""

from __future__ import annotations

SAVE, LOAD, RATE, SIZE, JAX, OTHER = (
    "2_save_breakdown",
    "3_load_breakdown",
    "4_throughput",
    "5_inventory",
    "8_jax",
    "9_other",
)

_WRITE, _READ = "/jax/orbax/write/", "/jax/orbax/read/"
_WRITE_ASYNC, _CACHE = "/jax/checkpoint/write/async/", "/jax/compilation_cache/"

# Event -> metric.
TAGS: dict[str, str] = {
    "/ckpt/snapshot_taken": f"{SAVE}/blocking_s",
    "/ckpt/committed": f"{SAVE}/total_s",
    "/ckpt/committed/bytes": f"{SIZE}/save_total_gb",
    "/ckpt/restored": f"{LOAD}/total_s",
    "/ckpt/restored/bytes": f"{SIZE}/load_total_gb",
    f"{_WRITE}blocking_duration_secs": f"{SAVE}/blocking_s",
    f"{_WRITE}total_duration_secs": f"{SAVE}/total_s",
    f"{_WRITE_ASYNC}blocking_duration_secs": f"{SAVE}/blocking_async_s",
    f"{_WRITE_ASYNC}total_duration_secs": f"{SAVE}/total_async_s",
    f"{_WRITE}directory_creation_secs": f"{SAVE}/directory_creation_s",
    f"{_WRITE}async_directory_creation_secs": f"{SAVE}/async_directory_creation_s",
    f"{_WRITE}blocking_directory_creation_secs": f"{SAVE}/blocking_directory_creation_s",
    f"{_WRITE}background_directory_creation_secs": f"{SAVE}/background_directory_creation_s",
    f"{_WRITE}checkpoint_start_sync_duration_secs": f"{SAVE}/checkpoint_start_sync_s",
    f"{_WRITE}blocking_sync_item_duration_secs": f"{SAVE}/blocking_sync_item_s",
    f"{_WRITE}background_item_finalize_secs": f"{SAVE}/background_item_finalize_s",
    f"{_WRITE_ASYNC}metadata_write_duration_secs": f"{SAVE}/metadata_write_s",
    f"{_WRITE_ASYNC}commit_duration_sec": f"{SAVE}/commit_s",
    f"{_WRITE_ASYNC}thread_duration_sec": f"{SAVE}/thread_duration_s",
    f"{_WRITE_ASYNC}ocdbt_merge_duration_secs": f"{SAVE}/ocdbt_merge_s",
    f"{_READ}blocking_duration_secs": f"{LOAD}/blocking_s",
    f"{_READ}async/blocking_duration_secs": f"{LOAD}/blocking_async_s",
    f"{_READ}total_duration_secs": f"{LOAD}/total_s",
    f"{_READ}async/total_duration_secs": f"{LOAD}/total_async_s",
    f"{_READ}worker/total_duration_secs": f"{LOAD}/worker_io_s",
    "/jax/checkpoint/read/primary_replica_deserialization_duration_secs": (
        f"{LOAD}/primary_deserialization_s"
    ),
    "/jax/checkpoint/read/broadcast_duration_secs": f"{LOAD}/broadcast_s",
    f"{_WRITE}gbytes": f"{SIZE}/save_total_gb",
    f"{_WRITE}compressed_gbytes": f"{SIZE}/save_compressed_gb",
    f"{_WRITE}replicated_array_gb": f"{SIZE}/replicated_array_gb",
    f"{_WRITE}sharded_array_gb": f"{SIZE}/sharded_array_gb",
    f"{_READ}worker/io/requested/gbytes": f"{SIZE}/load_requested_gb",
    "/jax/checkpoint/read/gbytes": f"{SIZE}/load_total_gb",
    f"{_WRITE}blocking_gbytes_per_sec": f"{RATE}/save_blocking_gbps",
    f"{_WRITE}gbytes_per_sec": f"{RATE}/save_total_gbps",
    f"{_READ}worker/io/requested/throughput/gbytes_per_sec": f"{RATE}/load_per_host_gbps",
    "/jax/checkpoint/read/gbytes_per_sec": f"{RATE}/load_total_gbps",
    "/jax/checkpoint/sync_global_devices_duration_sec": "7_overhead/sync_global_devices_s",
    f"{_CACHE}cache_hits": f"{JAX}/cache_hits_count",
    f"{_CACHE}cache_misses": f"{JAX}/cache_misses_count",
    f"{_CACHE}compile_requests_use_cache": f"{JAX}/compile_requests_count",
    f"{_CACHE}cache_retrieval_time_sec": f"{JAX}/cache_retrieval_s",
    f"{_CACHE}compile_time_saved_sec": f"{JAX}/compile_time_saved_s",
    "/jax/core/compile/backend_compile_duration": f"{JAX}/compile_s",
}

_LISTENED = ("/jax/orbax/", "/jax/checkpoint/", _CACHE, "/ckpt/")


def tag_of(event: str) -> str | None:
    """The metric of an event; None for events that do not measure the cost of a checkpoint."""
    if event in TAGS:
        return TAGS[event]
    if not event.startswith(_LISTENED) or event.endswith("_time"):
        return None  # a point in time, not a duration
    if event.endswith("_started"):
        return None
    return f"{OTHER}/{event.strip('/').replace('/', '_')}"


def is_rate(tag: str) -> bool:
    """Whether a metric is a rate or ratio, whose values must not be added up."""
    return tag.endswith(("gbps", "per_s", "_rate", "_ratio"))
