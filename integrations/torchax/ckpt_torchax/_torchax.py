"""Access to torchax if the program has imported it; this package never imports it."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from typing import Any

import torch

from ckpt_torchax import shim


def _from(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def is_tensor(value: object) -> bool:
    """Whether a value is a torchax tensor with its own array."""
    return "_elem" in getattr(value, "__dict__", ()) and is_jax(value)


def is_view(value: object) -> bool:
    """Whether a value is a torchax View: a part of another tensor, without its own array."""
    return is_jax(value) and not is_tensor(value)


def is_jax(value: object) -> bool:
    """Whether a value is a tensor that wraps a jax array."""
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


def unwrapped(module: Any) -> Any:
    """The user's module inside a JittableModule or the result of torch.compile."""
    jittable = _from("torchax.interop", "JittableModule")
    compiled = _from("torch._dynamo.eval_frame", "OptimizedModule")
    while True:
        cls = type(module)  # a JittableModule's __class__ is that of the inner module
        if jittable is not None and issubclass(cls, jittable):
            module = module._model
        elif compiled is not None and issubclass(cls, compiled):
            module = module._orig_mod
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
    if version == "0.0.13" and shim.is_needed():
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
