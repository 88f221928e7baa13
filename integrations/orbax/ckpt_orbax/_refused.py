"""What this package does not offer: an error that says what to write instead."""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ckpt_core import CheckpointError
from ckpt_core.arguments import answer_for_classes


class NotOffered(CheckpointError, NotImplementedError):
    """A name or an option of Orbax that ckpt refuses: what it is, why, and what to write instead."""


def not_offered(name: str, why: str, instead: str) -> NotOffered:
    """The error for ``name``, to be raised by the caller."""
    return NotOffered(f"{name} is not offered by ckpt_orbax: {why}. Instead: {instead}")


Refusals = Mapping[str, tuple[Any, str] | tuple[Any, str, str]]
"""Options by dotted name: the only value that ckpt can honour, why, and what to write instead of another one."""


def refuse_options(shown: str, options: Any, refusals: Refusals) -> None:
    """Raises NotOffered for an option that ckpt cannot honour; ``shown`` formats its name and value."""
    for name, (fine, why, *instead) in refusals.items():
        value = operator.attrgetter(name)(options)
        if value != fine:
            what = instead[0] if instead else f"leave it at {fine!r}"
            raise not_offered(shown.format(name, value), why, what)


def refuse_logger(call: str, logger: Any) -> None:
    """Raises NotOffered for a logger of Orbax that is given to ``call``."""
    if logger is not None:
        why = "Orbax's loggers get Orbax's statistics"
        raise not_offered(f"{call}(logger=)", why, _INSTEAD["logging"])


_INSTEAD = {
    "partial": "ckpt_core.writer(path), which adds items one by one",
    "delete": "training.Checkpointer(directory).delete(step), or shutil.rmtree(path)",
    "tree": "jax.tree",
    "Transform": "ckpt_core.load(path, like, rename=..., missing=..., unexpected=...)",
    "apply_transformations": "ckpt_core.load(path, like, rename=..., missing=..., unexpected=...)",
    "wait_for_new_checkpoint": "checkpoints_iterator, or ckpt_core.Checkpointer(directory).wait_for_new_step(after)",
    "msgpack_restore": "flax.serialization.msgpack_restore; `ckpt import` converts such files",
    "ProtoCheckpointHandler": "a CheckpointHandler of your own that writes message.SerializeToString()",
    "JaxRandomKeyCheckpointHandler": "StandardSave({'key': key}): keys are leaves",
    "logging": "ckpt_core.Options(on_event=...) as CheckpointManagerOptions(engine=) or context.engine; ckpt_core.events",
}
"""Names of Orbax for which ckpt has one call."""


_PACKAGES = ("emergency", "experimental", "path", "v1")
"""Modules that have others in them."""


def offer(package: str) -> None:
    """Makes modules importable by all their names in a package, as Orbax does, with answers to unknown names."""
    inside, places = f"{package}.", [package]
    for place in places:  # which grows meanwhile
        for name, module in vars(sys.modules[place]).items():
            if isinstance(module, ModuleType) and module.__name__.startswith(inside):
                sys.modules.setdefault(f"{place}.{name}", module)
                if name in _PACKAGES:
                    places.append(f"{place}.{name}")
    for name, module in [*sys.modules.items()]:
        if name == package or name.startswith(inside):
            kinds = [one for one in vars(module).values() if isinstance(one, type)]
            answer_for_classes(one for one in kinds if one.__module__.startswith(inside))
            vars(module)["__getattr__"] = refusing(module.__name__)


def refusing(module: str) -> Callable[[str], Any]:
    """``__getattr__`` of a module: an AttributeError with what to use instead; an ImportError to ``from module import ...``."""

    def getattr_of_module(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        instead = _INSTEAD.get(
            name, "ckpt_core itself, as ckpt_core.Checkpointer and ckpt_core.load"
        )
        says = (
            f"{module.partition('._')[0]} has no {name!r}: docs/api/orbax.md lists what programs use of Orbax. "
            f"Instead: {instead}"
        )
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if dis.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM":
            raise ImportError(says, name=module)
        raise AttributeError(says)

    return getattr_of_module
