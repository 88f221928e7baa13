"""``Context``: what its options become, which are refused, and when they may change."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_orbax import NotOffered, pathways
from ckpt_orbax import v1 as ocp
from ckpt_orbax.v1._engine import engine_options


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
        ("pytree.saving.pytree_metadata_options.support_rich_types", True),
        ("multiprocessing.primary_host", None),
        ("multiprocessing.active_processes", {0, 1}),
        ("deletion.gcs_deletion_options.todelete_full_path", "trash"),
        ("memory.serialization_status_callback", print),
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
        lambda: ocp.metadata(tmp_path / "x"),
        lambda: ocp.training.Checkpointer(tmp_path / "run"),
    ):
        with context, pytest.raises(NotOffered, match="Instead: ") as caught:
            call()
        assert f"Context.{name}" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_programs_may_say_that_there_is_no_pathways(tmp_path):
    kinds = pathways.CheckpointingImpl
    context = ocp.Context()
    context.pathways.checkpointing_impl = kinds.from_options(use_persistence_array_handler=False)
    with context:
        ocp.save(tmp_path / "x", {"w": 1})
        assert ocp.load(tmp_path / "x") == {"w": 1}
    assert kinds.from_options(use_persistence_array_handler=True) is kinds.PERSISTENCE
    assert kinds.from_options(use_colocated_python=True) is kinds.COLOCATED_PYTHON


@pytest.mark.parametrize(
    ("name", "value", "becomes", "expected"),
    [
        ("array.saving.ocdbt_target_data_file_size", 2**20, "target_data_file_bytes", 2**20),
        ("array.saving.ocdbt_target_data_file_size", 0, "target_data_file_bytes", 2**40),
        ("array.saving.storage_options.chunk_byte_size", 8, "chunk_bytes", 1024),
        ("array.loading.use_load_and_broadcast", True, "broadcast", True),
        ("asynchronous.timeout_secs", 30, "timeout_secs", 30.0),
        ("memory.write_concurrent_bytes", 2**20, "max_host_bytes", 2**20),
        ("memory.read_concurrent_bytes", 2**21, "max_host_bytes", 2**21),
        ("memory.transfer_concurrent_bytes", 1, "max_host_bytes", 1024),
    ],
)
def test_options_that_ckpt_has(name, value, becomes, expected):
    context = ocp.Context()
    context.engine = ckpt.Options(compression="zstd")
    setattr(*at(context, name), value)
    options = engine_options(context)
    assert getattr(options, becomes) == expected
    assert options.compression == "zstd"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("array.saving.use_compression", False),
        ("array.saving.enable_pinned_host_transfer", True),
        ("array.saving.use_replica_parallel", False),
        ("asynchronous.create_directories_asynchronously", False),
        ("atomicity.mode", ocp.options.AtomicityMode.COMMIT_FILE),
        ("file.skip_sync_file_validations", True),
        ("memory.deepcopy_host_arrays", False),
        ("memory.is_prioritized_key_fn", lambda key: True),
        ("multiprocessing.active_processes", {0}),
        ("multiprocessing.barrier_sync_key_prefix", "mine"),
        ("checkpoint_layout", "auto"),
    ],
)
def test_options_without_effect(name, value):
    context = ocp.Context()
    setattr(*at(context, name), value)
    assert engine_options(context) == ckpt.Options()


def test_an_active_context_cannot_change(tmp_path):
    context = ocp.Context()
    with context as same:
        assert same is context
        for name in ("pytree.loading.partial_load", "array.saving.storage_options.dtype"):
            with pytest.raises(RuntimeError, match="cannot change while"):
                setattr(*at(context, name), True)
        with pytest.raises(RuntimeError, match="cannot change while"):
            context.checkpoint_layout = "auto"
        inner = ocp.Context(context)
        inner.pytree.loading.partial_load = True
        with context, inner:
            pass
        with pytest.raises(RuntimeError, match="cannot change while"):
            context.pytree.loading.partial_load = True
    context.pytree.loading.partial_load = True
    assert ocp.Context(context).pytree.loading.partial_load
    assert not ocp.Context().pytree.loading.partial_load
    with pytest.raises(AttributeError, match="set the fields"):
        context.pytree = ocp.options.PyTreeOptions()


def test_options_as_arguments():
    mine = ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))
    context = ocp.Context(pytree_options=mine, checkpoint_layout="auto")
    mine.loading.partial_load = False
    assert context.pytree.loading.partial_load
    assert context.pytree_options is context.pytree
    assert context.checkpoint_layout is ocp.options.CheckpointLayout.AUTO


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
