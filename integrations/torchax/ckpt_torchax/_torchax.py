"""Access to torchax if the program has imported it; this package never imports it."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer

from ckpt_core import CheckpointError


def _from(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def is_tensor(value: object) -> bool:
    """Whether a value is a torchax tensor with its own array."""
    return "_elem" in getattr(value, "__dict__", ()) and is_jax(value)


def is_jax(value: object) -> bool:
    """Whether a value is a tensor that wraps a jax array, or a View: a part of another tensor, without its own array."""
    return _is_jax_class(type(value))


@functools.cache
def _is_jax_class(cls: type) -> bool:
    # A class of torchax exists only where torchax is imported, so the answer never changes.
    return any(
        base is _from("torchax.tensor", "Tensor") or base is _from("torchax.view", "View")
        for base in cls.__mro__
    )


def is_environment_class(cls: type) -> bool:
    """Whether a class is that of torchax environments, which hold the random key."""
    known = _from("torchax.tensor", "Environment")
    return known is not None and issubclass(cls, known)


class LoadTarget(torch.nn.Module):
    """A target for the loaded state of ``inside``, which the caller sets. As a torch module it passes the adapter."""

    state: Any = None

    def __init__(self, inside: Any) -> None:
        super().__init__()
        vars(self)["inside"] = inside  # bypasses torch's registration of submodules


def unwrapped(module: Any) -> Any:
    """The user's module inside a JittableModule, the result of torch.compile, or a LoadTarget."""
    jittable = _from("torchax.interop", "JittableModule")
    compiled = _from("torch._dynamo.eval_frame", "OptimizedModule")
    while True:
        cls = type(module)  # a JittableModule's __class__ is that of the inner module
        if jittable is not None and issubclass(cls, jittable):
            module = module._model
        elif compiled is not None and issubclass(cls, compiled):
            module = module._orig_mod
        elif cls is LoadTarget:
            module = module.inside
        else:
            return module


def parameter_or_tensor(array: Any, like: torch.Tensor) -> torch.Tensor:
    """A torchax tensor from an array; a Parameter if ``like`` is one."""
    torchax = require("to put a module on JAX arrays")
    made = torchax.tensor.Tensor(array, torchax.default_env())
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=like.requires_grad)
    return made


def require(purpose: str) -> Any:
    """The module torchax; raises ModuleNotFoundError if the program has not imported it."""
    torchax = sys.modules.get("torchax")
    if torchax is not None and hasattr(torchax, "default_env"):
        return torchax
    try:
        version = importlib.metadata.version("torchax")
    except importlib.metadata.PackageNotFoundError:
        message = f"torchax is needed {purpose}: pip install 'ckpt-core[torchax]'"
        raise ModuleNotFoundError(message, name="torchax") from None
    if version == "0.0.13" and not hasattr(torch.ops.aten.prod, "dim_Dimname"):  # see shim
        too_new = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 13)
        advice = "" if too_new else "call ckpt_torchax.shim.install() before `import torchax`, or "
        raise ModuleNotFoundError(
            f"torchax {version} cannot be imported with torch {torch.__version__}, which lacks names that it "
            f"looks up: {advice}pip install 'torch<{'2.14' if too_new else '2.13'}'",
            name="torchax",
        )
    raise ModuleNotFoundError(
        f"torchax is needed {purpose}, and is not imported: write `import torchax` first",
        name="torchax",
    )


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
    if threading.current_thread() is threading.main_thread():
        return
    enabled = torch.overrides._get_current_function_mode_stack()  # pyright: ignore
    if any(type(mode).__module__.startswith("torchax.") for mode in enabled):
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
