"""``Context``: which options are taken, which are refused, and when they may change."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_orbax import NotOffered, pathways
from ckpt_orbax import v1 as ocp


def at(context, name):
    """The options that hold the last part of a dotted name, and that part."""
    *parts, last = name.split(".")
    for part in parts:
        context = getattr(context, part)
    return context, last


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("array.saving.use_ocdbt", False),
        ("array.saving.use_zarr3", False),
        ("array.loading.enable_padding_and_truncation", True),
        ("array.loading.raise_array_data_missing_error", False),
        ("multiprocessing.primary_host", None),
        ("pathways.checkpointing_impl", pathways.CheckpointingImpl.PERSISTENCE),
        ("checkpoint_layout", "safetensors"),
    ],
)
def test_options_that_would_change_the_meaning_are_refused(tmp_path, name, value):
    context = ocp.Context()
    setattr(*at(context, name), value)
    for call in (
        lambda: ocp.save(tmp_path / "x", {"w": 1}),
        lambda: ocp.load(tmp_path / "x"),
        lambda: ocp.training.Checkpointer(tmp_path / "run"),
    ):
        with context, pytest.raises(NotOffered, match="Instead: "):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("array.saving.ocdbt_target_data_file_size", 2**20),
        ("array.saving.storage_options.chunk_byte_size", 8),
        ("array.saving.use_compression", False),
        ("array.loading.use_load_and_broadcast", True),
        ("asynchronous.timeout_secs", 30),
        ("asynchronous.create_directories_asynchronously", False),
        ("multiprocessing.active_processes", {0}),
        ("checkpoint_layout", "auto"),
    ],
)
def test_options_that_are_taken(tmp_path, name, value):
    context = ocp.Context()
    context.engine = ckpt.Options(compression="zstd")
    setattr(*at(context, name), value)
    with context:
        ocp.save(tmp_path / "x", {"w": np.arange(3000.0)})
        assert ocp.load(tmp_path / "x")["w"][-1] == 2999
    assert ckpt.verify(tmp_path / "x").ok


@pytest.mark.parametrize("size_bytes", [0, 2**20])
def test_bytes_of_a_data_file(tmp_path, size_bytes):
    context = ocp.Context()
    context.array.saving.ocdbt_target_data_file_size = size_bytes
    with context:
        ocp.save(tmp_path / "x", {f"w{n}": np.full(2**18, n, "f4") for n in range(8)})
    large = [file for file in tmp_path.rglob("d/*") if file.stat().st_size > 2**18]
    assert (len(large) > 1) == (size_bytes > 0)


def test_another_thread_has_the_defaults(tmp_path):
    ocp.save(tmp_path / "x", {"a": 1, "b": 2})
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    errors = []

    def load():
        try:
            ocp.load(tmp_path / "x", {"a": 0})
        except ocp.errors.TreeMismatchError as error:
            errors.append(error)

    with context:
        assert ocp.load(tmp_path / "x", {"a": 0}) == {"a": 1}
        assert ocp.load_async(tmp_path / "x", {"a": 0}).result() == {"a": 1}
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_of_a_checkpointer(tmp_path):
    context = ocp.Context()
    context.array.saving.storage_options.dtype = np.float16
    partial = ocp.Context()
    partial.pytree.loading.partial_load = True
    with ocp.training.Checkpointer(tmp_path, context=context) as checkpointer:
        checkpointer.save(0, {"a": np.ones(2), "b": 2})
        with partial:  # in its place
            checkpointer.save(1, {"a": np.ones(2), "b": 2})
            assert checkpointer.load(0, {"b": 0}) == {"b": 2}
        assert checkpointer.load(0)["a"].dtype == np.float16
        assert checkpointer.load(1)["a"].dtype == np.float64
        with pytest.raises(ocp.errors.TreeMismatchError):
            checkpointer.load(0, {"b": 0})
