"""Maps events of jax, Orbax and ckpt to metrics; the leading numbers sort them in TensorBoard."""

from __future__ import annotations

import re

SAVE, LOAD, RATE, SIZE, JAX, OTHER = (
    "2_save_breakdown",
    "3_load_breakdown",
    "4_throughput",
    "5_inventory",
    "8_jax",
    "9_other",
)

_ORBAX, _OLDER, _CACHE = "/jax/orbax/", "/jax/checkpoint/", "/jax/compilation_cache/"

_STAGE = re.compile(
    r"/jax/(?:orbax/(?:write|read(/async)?)|checkpoint/write(/async))/(\w+?)(?:_duration)?_secs?"
)
"""What Orbax measures of a save or a load; each under one of the two names that it reports."""

_TAGS = {
    "/ckpt/snapshot_taken": f"{SAVE}/blocking_s",
    "/ckpt/committed": f"{SAVE}/total_s",
    "/ckpt/committed/bytes": f"{SIZE}/save_total_gb",
    "/ckpt/restored": f"{LOAD}/total_s",
    "/ckpt/restored/bytes": f"{SIZE}/load_total_gb",
    f"{_OLDER}write/async/thread_duration_sec": f"{SAVE}/thread_duration_s",
    f"{_OLDER}read/primary_replica_deserialization_duration_secs": f"{LOAD}/primary_deserialization_s",
    f"{_OLDER}read/broadcast_duration_secs": f"{LOAD}/broadcast_s",
    f"{_OLDER}read/gbytes": f"{SIZE}/load_total_gb",
    f"{_OLDER}read/gbytes_per_sec": f"{RATE}/load_total_gbps",
    f"{_OLDER}sync_global_devices_duration_sec": "7_overhead/sync_global_devices_s",
    f"{_ORBAX}read/worker/total_duration_secs": f"{LOAD}/worker_io_s",
    f"{_ORBAX}read/worker/io/requested/gbytes": f"{SIZE}/load_requested_gb",
    f"{_ORBAX}read/worker/io/requested/throughput/gbytes_per_sec": f"{RATE}/load_per_host_gbps",
    f"{_ORBAX}write/gbytes": f"{SIZE}/save_total_gb",
    f"{_ORBAX}write/compressed_gbytes": f"{SIZE}/save_compressed_gb",
    f"{_ORBAX}write/replicated_array_gb": f"{SIZE}/replicated_array_gb",
    f"{_ORBAX}write/sharded_array_gb": f"{SIZE}/sharded_array_gb",
    f"{_ORBAX}write/blocking_gbytes_per_sec": f"{RATE}/save_blocking_gbps",
    f"{_ORBAX}write/gbytes_per_sec": f"{RATE}/save_total_gbps",
    f"{_CACHE}cache_hits": f"{JAX}/cache_hits_count",
    f"{_CACHE}cache_misses": f"{JAX}/cache_misses_count",
    f"{_CACHE}compile_requests_use_cache": f"{JAX}/compile_requests_count",
    f"{_CACHE}cache_retrieval_time_sec": f"{JAX}/cache_retrieval_s",
    f"{_CACHE}compile_time_saved_sec": f"{JAX}/compile_time_saved_s",
    "/jax/core/compile/backend_compile_duration": f"{JAX}/compile_s",
}


def tag_of(event: str) -> str | None:
    """The metric of an event; None for events that do not measure the cost of a checkpoint."""
    if event in _TAGS:
        return _TAGS[event]
    if stage := _STAGE.fullmatch(event):
        of_read, of_write, name = stage.groups()
        # these two are measured in the foreground as well
        more = "_async" if (of_read or of_write) and name in ("blocking", "total") else ""
        return f"{LOAD if '/read/' in event else SAVE}/{name}{more}_s"
    # "_time" is a point in time, not a duration
    if not event.startswith((_ORBAX, _OLDER, _CACHE, "/ckpt/")) or event.endswith(
        ("_time", "_started")
    ):
        return None
    return f"{OTHER}/{event.strip('/').replace('/', '_')}"


def is_rate(tag: str) -> bool:
    """Whether a metric is a rate or ratio, whose values must not be added up."""
    return tag.endswith(("gbps", "per_s", "_rate", "_ratio"))
