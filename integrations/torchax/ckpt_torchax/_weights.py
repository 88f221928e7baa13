"""Weights files and checkpoints: two calls into ``ckpt_core.convert``, which need torch for ``.pt`` only."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import ckpt_core as ckpt

PathLike = str | os.PathLike[str]
TORCH_SUFFIXES = (".pt", ".pth", ".bin")
FILES = (".safetensors", ".safetensors.index.json", *TORCH_SUFFIXES)


def export_file(path: PathLike, file: PathLike, *, item: str | None = None) -> None:
    """Writes a checkpoint's weights to ``file``, a ``.safetensors`` or ``.pt`` that any torch reads.

    The file has tensors by name, and tied weights under each of their names.

    Args:
        path: path of a checkpoint, or of one item in it.
        file: the file to write; an existing one is replaced atomically.
        item: as for ``to_torch``.

    Raises:
        CheckpointError: a value that is no array or number, or of a dtype that the file cannot hold, which
            the exports of ``ckpt_core.convert`` can leave out; or ``.pt`` without torch.

    Example::

        export_file("runs/1/step_100", "weights.safetensors")
    """
    target = Path(file).expanduser().absolute()
    if target.suffix not in (".safetensors", *TORCH_SUFFIXES):
        raise ValueError(
            f"{file}: a weights file ends in .safetensors, .pt, .pth or .bin: the checkpoint comes first, as in "
            "export_file(path, file)"
        )
    chosen = chosen_item(path, item)
    with tempfile.TemporaryDirectory(prefix=".ckpt-", dir=target.parent) as folder:
        written = os.path.join(folder, target.name)
        if target.suffix in TORCH_SUFFIXES:
            ckpt.convert.export_torch(path, written, item=chosen)
        else:
            ckpt.convert.export_safetensors(path, written, item=chosen, metadata={"format": "pt"})
        os.replace(written, target)


def import_file(
    file: PathLike, path: PathLike, *, item: str = "model", overwrite: bool = False
) -> None:
    """Saves the content of a ``.safetensors``, ``.safetensors.index.json`` or ``.pt`` file as a checkpoint.

    A ``.pt`` file is read with ``weights_only=True``: tensors and plain containers, no code.

    Args:
        file: the weights file.
        path: path of the checkpoint.
        item: the name of its only item, so that ``restore(path, model=module)`` finds it.
        overwrite: as for ``ckpt_core.save``.

    Raises:
        CheckpointNotFound: there is no such file.
        CheckpointCorrupt: the file is damaged.
        UnsupportedLeaf: a ``.pt`` file holds objects of other classes, such as a whole module.

    Example::

        import_file("weights.safetensors", "imported")
    """
    ckpt.convert.import_weights(file, path, item=item, overwrite=overwrite)


def chosen_item(path: PathLike, item: str | None) -> str:
    """The item that holds the model; ValueError if there are several, and none is called ``model``."""
    if item is not None:
        return item
    names = list(ckpt.inspect(path).items)
    if len(names) == 1:
        return names[0]
    if "model" in names:
        return "model"
    raise ValueError(f"{path} holds the items {', '.join(names)}: name one with item=")
