"""The random key of a torchax environment, which dropout and ``torch.rand`` draw from."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer

from ckpt_core import CheckpointError


def get_state(environment: Any) -> dict[str, Any]:
    """The key of the calling thread, which must be the one that draws from the environment."""
    key = environment.param.prng
    if isinstance(key, Tracer):
        raise CheckpointError(
            "the random key of the torchax environment is a tracer: torch code that draws (dropout) was compiled, "
            "and torchax 0.0.13 lets the key of the trace escape. Upgrade torchax when a newer one is released; "
            "until then pass a key into the step and run the model in "
            "`with env.override_property(prng=key):`, and set env.manual_seed(...) again now"
        )
    _refuse_foreign_thread(key)
    return {"prng": key}


def set_state(environment: Any, state: Mapping[str, Any]) -> None:
    """Sets the key of the calling thread, typed or raw as it was saved."""
    environment.param.prng = state["prng"]


def wanted(environment: Any, saved: Any) -> Any:
    """The saved key's kind: seeding may have replaced a typed key by a raw one."""
    key = environment.param.prng
    if not isinstance(key, Tracer):
        _refuse_foreign_thread(key)
    return saved if isinstance(saved, Mapping) and set(saved) == {"prng"} else {"prng": key}


def _refuse_foreign_thread(key: Any) -> None:
    """Refuses a key that torchax has only just made for this thread, from torch's seed at its first access: torchax keeps
    a key for every thread. The training thread has drawn from its key, or seeded it, or enabled torchax.
    """
    if threading.current_thread() is threading.main_thread() or _enabled_here():
        return
    if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        return
    fresh = jax.random.key(torch.initial_seed() % (1 << 63))
    if np.array_equal(jax.random.key_data(key), jax.random.key_data(fresh)):
        raise CheckpointError(
            f"thread {threading.current_thread().name!r} has a torchax random key of its own, which nothing has used: "
            "torchax keeps one per thread. Save and restore in the thread that trains, or seed it here "
            "with torchax.default_env().manual_seed(...)"
        )


def _enabled_here() -> bool:
    modes = torch.overrides._get_current_function_mode_stack()  # pyright: ignore
    return any(type(mode).__module__.startswith("torchax.") for mode in modes)
