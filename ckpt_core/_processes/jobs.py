"""jax's own services for the processes of a run: joining them, and stopping all at one step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ckpt_core._errors import CheckpointError
from ckpt_core._lazy import jax


def coordination() -> Any:
    """``client``, ``preemption_sync_manager`` and ``address`` of jax's distributed service, which has no public API;
    Orbax uses this one too. If a version of jax has moved it, a process that is alone needs none, and several raise
    CheckpointError.
    """
    if sys.modules.get("jax") is None:  # whoever has not imported it has joined nobody
        return SimpleNamespace(client=None, preemption_sync_manager=None, address=None)
    try:
        from jax._src import distributed

        state = distributed.global_state
        return SimpleNamespace(
            client=state.client,
            preemption_sync_manager=state.preemption_sync_manager,
            address=getattr(state, "coordinator_address", None),
        )
    except (ImportError, AttributeError) as error:
        if jax.process_count() > 1:
            raise CheckpointError(
                f"jax {jax.__version__} has no coordination service where ckpt looks for it, so its "
                f"{jax.process_count()} processes cannot agree on a checkpoint: upgrade ckpt-core, or use an "
                "older jax"
            ) from error
        return SimpleNamespace(client=None, preemption_sync_manager=None, address=None)


def coordinator_host() -> str:
    """Name or IP address of the coordination service's host, as this process was given it; or empty."""
    return (coordination().address or "").rpartition(":")[0].strip("[]")


def preemption_service_listens() -> bool:
    """Whether jax's preemption service is on, which hears SIGTERM in each process and tells the others."""
    state = coordination()
    return state.client is not None and state.preemption_sync_manager is not None


def preemption_sync_point(step: int) -> bool | None:
    """Whether all processes agreed, through jax's preemption service, to stop at this step; None if the service is
    off. All processes must call it for every step.
    """
    state = coordination()
    if state.client is None or state.preemption_sync_manager is None:
        return None
    from jax.experimental import multihost_utils

    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError:  # the coordinator is gone; the next agreement reports that more clearly
        return False


def join_from_environment(environment: Mapping[str, str]) -> bool:
    """Calls ``jax.distributed.initialize`` if the environment names the processes of the run; returns whether it is
    initialized afterwards. The variables are JAX_COORDINATOR_ADDRESS (with the port, or with JAX_COORDINATOR_PORT),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID; raises ValueError for only some. For programs that own the process, like the
    command line.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    missing = [name for name in names if not environment.get(name)]
    joined = coordination().client is not None
    if len(missing) == len(names) or joined:
        return joined
    if missing:
        raise ValueError(f"{', '.join(names)} go together; missing: {', '.join(missing)}")
    address = environment[names[0]]
    port = environment.get("JAX_COORDINATOR_PORT")
    if port and ":" not in address.rpartition("]")[2]:
        address = f"{address}:{port}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, num_processes=int(environment[names[1]]), process_id=int(environment[names[2]])
    )
    return True
