"""The functions of ``flax.training.checkpoints`` on ckpt's engine; Flax itself is not imported.

::

    from ckpt_orbax import flax_checkpoints as checkpoints  # was: from flax.training import checkpoints

Reads what Flax has written, files of msgpack and directories of Orbax; writes directories that ckpt, Orbax and Flax read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from typing import Any

import ckpt_core as ckpt
from ckpt_core.arguments import an, answering
from ckpt_orbax._leaves import leaves_of, path_text, plain
from ckpt_orbax._paths import as_text, kind_at, refuse_another_series
from ckpt_orbax._refused import not_offered, refusing
from ckpt_orbax._targets import saved_leaves
from ckpt_orbax.checkpoint_utils import construct_restore_args
from ckpt_orbax.checkpointers import PyTreeCheckpointer
from ckpt_orbax.path.step import is_checkpoint_finalized

logger = logging.getLogger("ckpt_orbax")


class AsyncManager:
    """Lets ``save_checkpoint`` return once the arrays are copied; the next save waits for the one before.

    Example:
        >>> from ckpt_orbax import flax_checkpoints
        >>> import numpy as np, tempfile
        >>> directory, manager = tempfile.mkdtemp(), flax_checkpoints.AsyncManager()
        >>> _ = flax_checkpoints.save_checkpoint(
        ...     directory, {"w": np.ones(2)}, 3, async_manager=manager
        ... )
        >>> manager.wait_previous_save()
        >>> flax_checkpoints.restore_checkpoint(directory, {"w": np.zeros(2)})["w"].tolist()
        [1.0, 1.0]
    """

    def __init__(self, max_workers: int = 1) -> None:
        self.running: ckpt.Checkpointer | None = None

    def wait_previous_save(self) -> None:
        """Blocks until no save is running; raises the error of a failed one."""
        if self.running is not None:
            self.running.close()
        self.running = None


@answering
def save_checkpoint(
    ckpt_dir: Any,
    target: Any,
    step: int | float,
    prefix: str = "checkpoint_",
    keep: int = 1,
    overwrite: bool = False,
    keep_every_n_steps: int | None = None,
    async_manager: AsyncManager | None = None,
    orbax_checkpointer: Any = None,
) -> str:
    """Saves a step and deletes old ones; the path of the step. All processes must call it.

    Args:
        step: a whole number.
        prefix: of the names of the steps; ends with an underscore.
        keep: how many of the newest steps stay.
        overwrite: delete newer steps, and exchange one of this number.
        keep_every_n_steps: multiples of it stay, too.
        async_manager: return once the arrays are copied.
        orbax_checkpointer: of no effect.

    Raises:
        CheckpointExists: there is such a step, or a newer one, and not ``overwrite``.
        NotOffered: the number of the step is no whole one, or the prefix has a slash or no underscore.
        TypeError, ValueError: ``async_manager`` or ``keep`` is something else.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}: pass a large number to keep all")
    if async_manager is not None:
        if not isinstance(async_manager, AsyncManager):
            raise TypeError(
                f"async_manager must be a flax_checkpoints.AsyncManager(), got {an(async_manager)}"
            )
        async_manager.wait_previous_save()
    directory = as_text(ckpt_dir)
    refuse_another_series(directory, _step_prefix(prefix))
    checkpointer = ckpt.Checkpointer(
        directory,
        max_to_keep=keep,
        keep_period=keep_every_n_steps,
        step_prefix=_step_prefix(prefix),
        options=ckpt.Options(flat="://" not in directory),  # as Flax expects it
    )
    with contextlib.ExitStack() as closing:
        closing.callback(checkpointer.close)
        _save(checkpointer, target, _whole(step), overwrite)
        if async_manager is not None:
            closing.pop_all()
            async_manager.running = checkpointer
    return _path_of(ckpt_dir, step, prefix)


def _save(checkpointer: ckpt.Checkpointer, target: Any, step: int, overwrite: bool) -> None:
    state = plain(target)
    if not isinstance(state, (dict, list, tuple)):
        raise ValueError(f"target must be a pytree, got {an(target)}: put it into a dict")
    steps = checkpointer.all_steps()
    if steps and steps[-1] >= step and not overwrite:
        raise ckpt.CheckpointExists(
            f"{checkpointer.directory}: step {step} is not newer than {steps[-1]}: save with "
            "overwrite=True, which deletes the steps after this one"
        )
    for number in reversed(steps):
        if number > step:
            checkpointer.delete(number)
    checkpointer.save(step, state, force=True, overwrite=step in steps)


save_checkpoint_multiprocess = save_checkpoint
"""The same: the engine saves with all processes anyhow."""


@answering
def restore_checkpoint(
    ckpt_dir: Any,
    target: Any,
    step: int | float | None = None,
    prefix: str = "checkpoint_",
    parallel: bool = True,
    gda_manager: Any = None,
    allow_partial_mpa_restoration: bool = False,
    orbax_checkpointer: Any = None,
    orbax_transforms: Any = None,
) -> Any:
    """A step as ``target`` looks; ``target`` itself if there is none.

    Args:
        ckpt_dir: directory of the steps, or one checkpoint.
        target: a pytree; None for nested dicts.
        step: its number; None for the newest.
        prefix: of the names of the steps.
        parallel, gda_manager, allow_partial_mpa_restoration, orbax_checkpointer: of no effect.
        orbax_transforms: refused, except None.

    As in Flax, leaves of the target that the checkpoint lacks keep their values, and saved ones that it does not name are
    left out. The log names the former: ``ckpt_core.load(path, target)`` raises instead.

    Raises:
        ValueError: there is no such step, or leaves of one name differ in shape.
        OSError: the system cannot say whether there is one.
    """
    if orbax_transforms:
        why = "patterns would change the tree between the file and its checks"
        instead = "ckpt_core.load(path, target, rename=...)"
        raise not_offered("restore_checkpoint(orbax_transforms=)", why, instead)
    directory = as_text(ckpt_dir)
    if step is not None:
        path = _path_of(directory, step, prefix)
        if not (is_checkpoint_finalized(path) if "://" in path else kind_at(path)):
            raise ValueError(f"Matching checkpoint not found: {path}")
    else:
        path = latest_checkpoint(directory, prefix)
        if path is None and _is_one(directory):
            path = directory
    if path is None:
        return target
    if kind_at(path) == "file":
        return _of_file(path, target)
    if target is None:
        return PyTreeCheckpointer().restore(path)
    args = construct_restore_args(target)
    _log_kept(path, target)
    return PyTreeCheckpointer().restore(path, item=target, restore_args=args, transforms={})


def _log_kept(path: str, target: Any) -> None:
    """Logs which leaves of the target keep their values: training would go on from those in silence."""
    items = [*ckpt.inspect(path).items.values()]
    wanted = {path_text(at) for at in leaves_of(target)}
    if len(items) == 1 and (kept := sorted(wanted - saved_leaves(items[0]).keys())):
        more = f" and {len(kept) - 5} more" if len(kept) > 5 else ""
        says = "%s lacks leaves of the target, which keep their values: %s%s. ckpt_core.load(path, target) raises instead"
        logger.warning(says, path, ", ".join(kept[:5]), more)


def _of_file(path: str, target: Any) -> Any:
    """What Flax has written as msgpack."""
    with tempfile.TemporaryDirectory(prefix="ckpt-flax-") as place:
        imported = os.path.join(place, "imported")
        ckpt.convert.import_weights(path, imported, like=target)
        return ckpt.load(imported, target)


def latest_checkpoint(ckpt_dir: Any, prefix: str = "checkpoint_") -> str | None:
    """The path of the newest step, or None."""
    found = _numbers(as_text(ckpt_dir), prefix)
    return _path_of(ckpt_dir, max(found), prefix) if found else None


def available_steps(
    ckpt_dir: Any, prefix: str = "checkpoint_", step_type: type[int] | type[float] = int
) -> list[int | float]:
    """The numbers of the steps, ascending."""
    return [step_type(number) for number in sorted(_numbers(as_text(ckpt_dir), prefix))]


def _numbers(directory: str, prefix: str) -> list[int]:
    if "://" not in directory:
        names = os.listdir(directory) if kind_at(directory) == "directory" else []
        named = filter(None, map(re.compile(re.escape(prefix) + r"(\d+)").fullmatch, names))
        return [int(one[1]) for one in named if _is_one(os.path.join(directory, one[0]))]
    if is_checkpoint_finalized(directory):
        return []
    with ckpt.Checkpointer(directory, read_only=True) as reader:
        steps = reader.all_steps()
    return [step for step in steps if _is_one(_path_of(directory, step, prefix))]


def _is_one(path: str) -> bool:
    return kind_at(path) == "file" or is_checkpoint_finalized(path)


def _path_of(directory: Any, step: int | float, prefix: str) -> str:
    return os.path.join(as_text(directory), f"{prefix}{_whole(step)}")


def _whole(step: int | float) -> int:
    if isinstance(step, str):
        raise TypeError(f"step must be a whole number, got the text {step!r}: pass {step}")
    if int(step) != step:
        instead = "a step that counts batches, and the rest as a leaf"
        raise not_offered(f"a step {step}", "steps are whole numbers", instead)
    return int(step)


def _step_prefix(prefix: str) -> str | None:
    folder, slash, name = prefix.rpartition("/")
    if slash:
        raise not_offered(
            f"prefix={prefix!r}",
            "of names with a slash Flax finds none again, and a restore of the newest step would begin anew",
            f"os.path.join(ckpt_dir, {folder!r}) as ckpt_dir, with prefix={name or 'checkpoint_'!r}",
        )
    if prefix and not prefix.endswith("_"):
        raise not_offered(
            f"prefix={prefix!r}", "a prefix ends with an underscore", f"prefix={prefix + '_'!r}"
        )
    return prefix[:-1] or None


__getattr__ = refusing(__name__)
