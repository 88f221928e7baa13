"""Saves and loads models without ``fit``, also for a custom training loop with the names of Keras' guide."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import ckpt_core as ckpt
from ckpt_core.arguments import answering
from ckpt_keras import _items
from ckpt_keras._adapter import ADAPTER, named, require_jax
from ckpt_keras._matching import names_by_order
from ckpt_keras._slots import counted_in, nameless

Path = str | os.PathLike[str]


@answering
def save(
    directory: Path,
    model: Any,
    step: int | None = None,
    *,
    what: str = "all",
    overwrite: bool = False,
    metadata: Any = None,
    metrics: Mapping[str, float] | None = None,
    host_only: bool = False,
    options: ckpt.Options | None = None,
) -> str:
    """Saves the model, its optimizer and its configuration; returns the path of the checkpoint.

    Blocks until everything is on the disk.

    Args:
        directory: a directory of steps; without ``step`` the checkpoint itself.
        model: a built model; compiled or not.
        step: number of the step in the directory.
        what: ``"all"``, or ``"weights"`` for weights and random state alone.
        overwrite: replace what is there.
        metadata, metrics, options: see ``ckpt_core.Checkpointer``.
        host_only: for backends other than JAX.

    Raises:
        CheckpointExists: the step, or a newer one, is there already.

    Example:
        >>> import keras, tempfile, ckpt_keras
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="out")])
        >>> directory = tempfile.mkdtemp()
        >>> path = ckpt_keras.save(directory, model, step=3)
        >>> ckpt_keras.load_model(directory).layers[0].name
        'out'
    """
    require_jax(host_only)
    _refuse_other_types("save(directory, model)", directory, model)
    if step is None and metrics is not None:
        raise TypeError("metrics= belongs to a step: pass step= as well")
    arguments: dict[str, Any] = {"overwrite": overwrite, "metadata": metadata}
    arguments |= {"weights_only": _weights_only(what), "config": _items.config_item(model)}
    if step is not None:
        with ckpt.Checkpointer(directory, asynchronous=False, options=options) as checkpointer:
            write = partial(checkpointer.save, step, metrics=metrics, force=True)
            _items.save_with(write, model, **arguments)
            return f"{checkpointer.directory}/{step}"
    try:
        _items.save_with(partial(ckpt.save, directory, options=options), model, **arguments)
    except ckpt.CheckpointExists as error:
        if _one_checkpoint(directory) is None:
            error.add_note(
                "ckpt_keras: a step of a directory is saved with step=, as in save(directory, model, step=3)"
            )
        raise
    return os.path.abspath(os.path.expanduser(directory))


@answering
def restore(
    directory: Path,
    model: Any,
    step: int | None = None,
    *,
    what: str = "all",
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    cast: bool = False,
    missing: str = "error",
    unexpected: str = "error",
    host_only: bool = False,
    options: ckpt.Options | None = None,
) -> ckpt.Restored:
    """Restores a model in place; returns ``Restored``, whose ``report`` says what was loaded.

    Reads checkpoints of this package and of ``keras.callbacks.OrbaxCheckpoint``. Everything is
    compared before anything changes. ``report.missing`` and ``report.unexpected`` are empty unless
    the arguments allow otherwise.

    Args:
        directory: a directory of steps, or one step.
        model: a built model; compiled, to restore the optimizer.
        step: the step to restore; by default the newest.
        what: ``"all"``, or ``"weights"`` for weights and random state alone, into a model with
            another optimizer or none.
        rename, cast, missing, unexpected, options: see ``ckpt_core.restore``.
        host_only: for backends other than JAX.

    Raises:
        CheckpointNotFound: the directory, the step, or a model in it does not exist.
        CheckpointCorrupt: a byte differs from what was saved.
        StructureMismatch: the checkpoint is of another model; nothing was changed.
    """
    require_jax(host_only)
    _refuse_other_types("restore(directory, model)", directory, model)
    weights_only = _weights_only(what)
    with _opened(directory, step, options) as (read, saved):
        return _items.restore_with(
            read,
            model,
            saved,
            options,
            only=saved.only_weights() if weights_only else None,
            rename=rename,
            cast=cast,
            missing=missing,
            unexpected=unexpected,
        )


@answering
def load_model(
    directory: Path,
    step: int | None = None,
    *,
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    host_only: bool = False,
    options: ckpt.Options | None = None,
) -> Any:
    """A new model as it was saved: layers, weights, random state, compilation and optimizer.

    The current ``keras.distribution`` places its arrays, whatever devices saved it. Reads
    checkpoints of this package and of ``keras.callbacks.OrbaxCheckpoint``.

    Args:
        directory: a directory of steps, or one step.
        step: the step to load; by default the newest.
        custom_objects: classes and functions by name, as for ``keras.saving.load_model``.
        compile: False returns the model without optimizer and losses.
        safe_mode: refuse configurations that hold code (lambdas).
        host_only: for backends other than JAX.
        options: see ``ckpt_core.Options``.

    Raises:
        CheckpointNotFound: the directory or step does not exist, or has no configuration.
        CheckpointCorrupt: a byte differs from what was saved.
    """
    require_jax(host_only)
    _refuse_other_types("load_model(directory)", directory)
    with _opened(directory, step, options) as (read, saved):
        model = _items.model_from_config(
            saved, options, compile=compile, custom_objects=custom_objects, safe_mode=safe_mode
        )
        compiled = getattr(model, "optimizer", None) is not None
        all_of_it = compiled and not saved.weights_only
        lost, names = nameless(model), dict[str, str]()
        if lost and saved.info.format_version is not None:  # Orbax stores leaves in another order
            leaves = saved.info.items[saved.item].leaves
            names = names_by_order(leaves, named(model), lost=lost, counted=counted_in(model))
        _items.restore_with(
            read,
            model,
            saved,
            options,
            rebuilt=True,
            only=None if all_of_it else saved.only_weights(),
            rename=(lambda path: names.get(path, path)) if names else None,
        )
    return model


def _refuse_other_types(call: str, directory: Any, *models: Any) -> None:
    """Raises if the arguments have other types than ``call`` takes, or another order, or the path is a file."""
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(
            f"the path of a directory of checkpoints must be a str or an os.PathLike object, got a "
            f"{type(directory).__name__}: the directory comes first, as in ckpt_keras.{call}"
        )
    for kind in map(type, models):
        if not ADAPTER.accepts(kind):
            raise TypeError(
                f"the model must be a Keras model, got a {kind.__name__}: ckpt_keras.{call}"
            )
    path = os.path.expanduser(os.fspath(directory))
    if os.path.isfile(path):
        raise ckpt.CheckpointNotFound(f"{path} is a file, and no directory of checkpoints")


def _weights_only(what: str) -> bool:
    if what not in ("all", "weights"):
        raise ValueError(f"what must be 'all' or 'weights', got {what!r}")
    return what == "weights"


@contextlib.contextmanager
def _opened(
    directory: Path, step: int | None, options: ckpt.Options | None
) -> Generator[tuple[Callable[..., ckpt.Restored], _items.SavedModel]]:
    """What restores one checkpoint (a step of a directory, or a path), and what it holds."""
    one = _one_checkpoint(directory)
    if one is not None:
        if step is not None:
            raise ckpt.CheckpointExists(
                f"{os.fspath(directory)} is one checkpoint, and step={step} asks for a step of a directory: pass the path "
                "alone, or the directory that holds the steps"
            )
        yield partial(ckpt.restore, one.path, options=options), _items.saved_model(one)
        return
    with ckpt.Checkpointer(directory, read_only=True, options=options) as checkpointer:
        chosen = checkpointer.latest_step() if step is None else step
        if chosen is None:
            where = checkpointer.directory
            ckpt.inspect(where)  # its error says whether the path exists, and which is like it
            raise ckpt.CheckpointNotFound(f"{where} holds no checkpoint: no step was saved there")
        saved = _items.saved_model(checkpointer.inspect(chosen))
        yield partial(checkpointer.restore, chosen), saved


def _one_checkpoint(path: Path) -> ckpt.CheckpointInfo | None:
    """What is at a path, if that is one checkpoint and not a directory of steps."""
    try:
        info = ckpt.inspect(path)
    except ckpt.CheckpointNotFound:
        return None
    return info if info.items else None


class KerasCheckpointManager:
    """Saves and restores a model by epoch in a directory of steps.

    This is the class of Keras' Orbax guide, as an import instead of code to paste. Three differences:
    a restore loads the requested step (the guide's loads the newest for 0), a refused save raises
    (the guide's returns False), and writing continues in the background.

    Args:
        model: a built model; compiled, to save its optimizer.
        checkpoint_dir: the directory of the steps; created if missing.
        max_to_keep: the number of newest steps to keep; None keeps all.
        steps_per_epoch: step numbers are ``epoch * steps_per_epoch``.
        host_only: for backends other than JAX.
        **kwargs: arguments of ``ckpt_core.Checkpointer``, such as ``keep_period=10``.

    Example:
        >>> import keras, tempfile
        >>> from ckpt_keras import KerasCheckpointManager
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> with KerasCheckpointManager(model, tempfile.mkdtemp()) as manager:
        ...     _ = manager.save_state(0)
        ...     manager.restore_state().step
        0
    """

    def __init__(
        self,
        model: Any,
        checkpoint_dir: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        steps_per_epoch: int = 1,
        *,
        host_only: bool = False,
        **kwargs: Any,
    ) -> None:
        require_jax(host_only)
        if isinstance(model, (str, os.PathLike)):
            raise TypeError(
                f"the model comes first, and then the directory: KerasCheckpointManager(model, {os.fspath(model)!r})"
            )
        self.model = model
        self.steps_per_epoch = steps_per_epoch
        self.checkpointer = ckpt.Checkpointer(checkpoint_dir, max_to_keep=max_to_keep, **kwargs)
        self._options: ckpt.Options | None = kwargs.get("options")
        self._config: _items.ConfigItem | None = None

    def save_state(self, epoch: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Starts a save of the model after this epoch; returns whether it did.

        When it returns, the model may change. False for an epoch that this manager has saved.

        Raises:
            CheckpointExists: another run saved this step, or a newer one.
            Exception: the error of the previous save.
        """
        if self._config is None:
            self._config = _items.config_item(self.model)
        save = partial(self.checkpointer.save, epoch * self.steps_per_epoch)
        try:
            return _items.save_with(save, self.model, self._config, metrics=metrics)
        except ckpt.CheckpointExists as error:
            error.add_note(
                "ckpt_keras: manager.checkpointer has the methods rollback_to and save, with force= and overwrite=; "
                "manager.restore_state() does what restore_latest() does"
            )
            raise

    def restore_state(self, step: int | None = None) -> ckpt.RestoredStep | None:
        """Restores a step into the model, by default the newest complete one; None if there is none.

        Raises:
            StructureMismatch: the checkpoint is of another model; nothing was changed.
            CheckpointNotFound: there is no such step.
        """
        self.checkpointer.wait_until_finished()  # the running save may be the step to restore
        run = self.checkpointer
        if step is None:
            restore, saved = run.restore_latest, _items.newest_model(run, run.all_steps())
        else:
            restore, saved = partial(run.restore, step), _items.saved_model(run.inspect(step))
        if saved is None:
            return None
        return _items.restore_with(restore, self.model, saved, self._options)

    def all_steps(self) -> list[int]:
        """Every committed step, ascending."""
        return self.checkpointer.all_steps()

    def latest_step(self) -> int | None:
        """The newest committed step, or None."""
        return self.checkpointer.latest_step()

    def wait_until_finished(self) -> None:
        """Returns when no save is running; raises the error of a failed one."""
        self.checkpointer.wait_until_finished()

    def close(self) -> None:
        """Waits for a running save and ends the use of this object."""
        self.checkpointer.close()

    def __enter__(self) -> KerasCheckpointManager:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.checkpointer.__exit__(kind, error, trace)


KerasOrbaxCheckpointManager = KerasCheckpointManager
"""The name in Keras' guide."""
