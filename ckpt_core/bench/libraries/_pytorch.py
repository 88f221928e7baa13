# ruff: noqa: TID251 (measures other libraries, which are imported inside functions only)
"""PyTorch's own checkpoints, of the same values as CPU tensors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ckpt_core.bench.libraries._base import FlatLibrary, names_of


class _Torch(FlatLibrary):
    modules = ("torch",)

    def of_leaf(self, leaf: Any) -> Any:
        import torch

        # Through bytes, because torch does not accept numpy's bfloat16.
        flat = np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)
        return torch.from_numpy(flat.copy()).view(_torch_dtype(leaf.dtype)).reshape(leaf.shape)

    def to_leaf(self, found: Any, like: Any) -> Any:
        import torch

        raw = found.contiguous().reshape(-1).view(torch.uint8).numpy()
        return raw.view(np.dtype(like.dtype)).reshape(like.shape)


class TorchSave(_Torch):
    """``torch.save``: one zip file of pickles, nothing fsynced."""

    def save(self, path: Path, state: Any) -> None:
        import torch

        torch.save(state, path)

    def load(self, path: Path, like: Any) -> Any:
        import torch

        del like
        return torch.load(path, weights_only=True)


class TorchDcp(_Torch):
    """``torch.distributed.checkpoint`` with one process: fsyncs data files, not directories."""

    default_durability = "data files"
    skips_fsync = True
    in_background = True

    def _writer(self, path: Path) -> Any:
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(path, sync_files=self.options.durable is not False)

    def save(self, path: Path, state: Any) -> None:
        from torch.distributed import checkpoint as dcp

        with _alone():
            dcp.save(state, storage_writer=self._writer(path), no_dist=True)

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        from torch.distributed import checkpoint as dcp

        # The background thread warns as well, so the filter stays active until it ends.
        quiet = contextlib.ExitStack()
        quiet.enter_context(_alone())
        future: Any = dcp.async_save(state, storage_writer=self._writer(path), no_dist=True)

        def wait() -> None:
            with quiet:
                future.result()

        return wait

    def load(self, path: Path, like: Any) -> Any:
        import torch
        from torch.distributed import checkpoint as dcp

        # It loads in place, so allocating the tensors is part of the cost of loading.
        target = {
            name: torch.empty(leaf.shape, dtype=_torch_dtype(leaf.dtype))
            for name, leaf in zip(names_of(like), jax.tree.leaves(like), strict=True)
        }
        with _alone():
            dcp.load(target, checkpoint_id=path, no_dist=True)
        return target


@contextlib.contextmanager
def _alone() -> Generator[None, None, None]:
    """Silences the warning about a missing process group: these benchmarks use one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        yield


def _torch_dtype(dtype: Any) -> Any:
    import torch

    return getattr(torch, str(np.dtype(dtype)))
