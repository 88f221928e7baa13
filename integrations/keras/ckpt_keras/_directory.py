"""Saves and loads models without ``fit``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import ckpt_core as ckpt
from ckpt_core import Checkpointer, CheckpointExists, CheckpointNotFound, Options, Restored
from ckpt_core.arguments import answering
from ckpt_keras._adapter import ADAPTER, named
from ckpt_keras._assets import saved_beside
from ckpt_keras._backend import require_jax
from ckpt_keras._config import CONFIG, config_item, model_from_config
from ckpt_keras._items import Contents, contents_of, model_items, model_targets
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
    options: Options | None = None,
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
    with saved_beside():
        weights_only = _weights_only(what)
        items = model_items(model, weights_only=weights_only, config=config_item(model))
        if step is None:
            _save_one(directory, items, options, overwrite, metadata)
            return os.path.abspath(os.path.expanduser(directory))
        return _save_step(directory, step, items, options, overwrite, metadata, metrics)


def _save_one(
    directory: Path,
    items: Mapping[str, Any],
    options: Options | None,
    overwrite: bool,
    metadata: Any,
) -> None:
    try:
        ckpt.save(directory, overwrite=overwrite, metadata=metadata, options=options, **items)
    except CheckpointExists as error:
        if not _is_step(os.fspath(directory)):
            error.add_note(
                "ckpt_keras: a step of a directory is saved with step=, as in save(directory, model, step=3)"
            )
        raise


def _save_step(
    directory: Path,
    step: int,
    items: Mapping[str, Any],
    options: Options | None,
    overwrite: bool,
    metadata: Any,
    metrics: Mapping[str, float] | None,
) -> str:
    with Checkpointer(directory, asynchronous=False, options=options) as checkpointer:
        checkpointer.save(
            step, items=items, overwrite=overwrite, metadata=metadata, metrics=metrics, force=True
        )
        return f"{checkpointer.directory}/{step}"


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
    options: Options | None = None,
) -> Restored:
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
    with _Source(directory, step, options) as source:
        only = source.contents.only_weights() if weights_only else None
        return source.restore(
            model,
            only=only,
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
    options: Options | None = None,
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
    with _Source(directory, step, options) as source:
        model = model_from_config(
            source.config(),
            where=source.path,
            custom_objects=custom_objects,
            compile=compile,
            safe_mode=safe_mode,
        )
        compiled = getattr(model, "optimizer", None) is not None
        all_of_it = compiled and not source.contents.weights_only
        only = None if all_of_it else source.contents.only_weights()
        names = source.names_by_order(model)
        source.restore(
            model,
            rebuilt=True,
            only=only,
            rename=(lambda path: names.get(path, path)) if names else None,
        )
    return model


def _refuse_other_types(call: str, directory: Any, *models: Any) -> None:
    """Returns if the arguments have the types that ``call`` takes.

    Raises:
        TypeError: they have other types or another order.
        CheckpointNotFound: the path is a file; the message says what reads it.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(
            f"the path of a directory of checkpoints must be a str or an os.PathLike object, got a "
            f"{type(directory).__name__}: the directory comes first, as in ckpt_keras.{call}"
        )
    for model in models:
        if not ADAPTER.accepts(type(model)):
            raise TypeError(
                f"the model must be a Keras model, got a {type(model).__name__}: ckpt_keras.{call}"
            )
    path = os.path.expanduser(os.fspath(directory))
    if os.path.isfile(path):
        raise CheckpointNotFound(
            f"{path} is {_kind_of_file(path)}, and no directory of checkpoints"
        )


def _kind_of_file(path: str) -> str:
    if path.endswith(".weights.h5"):
        return "a file of weights of Keras' own, which model.load_weights(path) reads"
    if path.endswith((".keras", ".h5", ".hdf5")):
        return "a model file of Keras' own, which keras.saving.load_model(path) reads"
    return "a file"


def _weights_only(what: str) -> bool:
    if what not in ("all", "weights"):
        raise ValueError(f"what must be 'all' or 'weights', got {what!r}")
    return what == "weights"


class _Source:
    """One checkpoint: a step in a directory of steps, or a path to a single checkpoint."""

    def __init__(self, directory: Path, step: int | None, options: Options | None) -> None:
        self._options = options
        self._step = step
        self.path = os.fspath(directory)
        if step is None and _is_step(self.path):
            self._checkpointer = None
            info = ckpt.inspect(self.path)
        else:
            if step is not None and _is_step(self.path):
                raise CheckpointExists(
                    f"{self.path} is one checkpoint, and step={step} asks for a step of a directory: pass the path alone, "
                    "or the directory that holds the steps"
                )
            self._checkpointer = Checkpointer(directory, read_only=True, options=options)
            self._step = self._checkpointer.latest_step() if step is None else step
            self.path = self._checkpointer.directory
            if self._step is None:
                # its error tells whether the path exists, and which is like it
                ckpt.inspect(self.path)
                raise CheckpointNotFound(
                    f"{self.path} holds no checkpoint: no step was saved there"
                )
            info = self._checkpointer.inspect(self._step)
        self.path, self._info = info.path, info
        self.contents: Contents = contents_of(info)

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *error: object) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()

    def config(self) -> Any:
        """The item with the configuration; empty if none was saved."""
        if not self.contents.has_config:
            return {}
        return ckpt.load(self.path, item=CONFIG, options=self._options)

    def names_by_order(self, model: Any) -> dict[str, str]:
        """Maps saved names to those of a model that was just made from the configuration."""
        if self._info.format_version is None:  # Orbax stores leaves in another order
            return {}
        leaves = self._info.items[self.contents.item].leaves
        lost, counted = nameless(model), counted_in(model)
        return names_by_order(leaves, named(model), lost=lost, counted=counted)

    def restore(self, model: Any, *, rebuilt: bool = False, **arguments: Any) -> Restored:
        """Restores the model's item into a model."""
        with saved_beside():
            items = model_targets(
                model,
                self.contents,
                self._info,
                self._options,
                rename=arguments.get("rename"),
                rebuilt=rebuilt,
            )
            if self._checkpointer is None:
                return ckpt.restore(self.path, items=items, options=self._options, **arguments)
            assert self._step is not None
            return self._checkpointer.restore(self._step, items=items, **arguments)


def _is_step(path: str) -> bool:
    """Whether a path is one checkpoint, not a directory of steps."""
    try:
        return bool(ckpt.inspect(path).items)
    except CheckpointNotFound:
        return False
