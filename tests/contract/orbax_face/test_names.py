"""The names of Orbax that client programs use are here; any other is refused with where to read on."""

from __future__ import annotations

import importlib

import pytest

import ckpt_orbax

NAMES = {
    "": """
        ArrayCheckpointHandler ArrayRestoreArgs AsyncCheckpointer AsyncCheckpointHandler AsyncOptions CheckpointArgs
        Checkpointer CheckpointHandler CheckpointManager CheckpointManagerOptions CompositeCheckpointHandler
        JsonCheckpointHandler PLACEHOLDER PyTreeCheckpointer PyTreeCheckpointHandler RestoreArgs SaveArgs
        StandardCheckpointer StandardCheckpointHandler args checkpoint_args checkpoint_manager checkpoint_managers
        checkpoint_utils checkpointers future handlers metadata multihost options path pathways test_utils
        tree type_handlers utils v1
    """,
    "args": """
        ArrayRestore ArraySave CheckpointArgs Composite JsonRestore JsonSave PyTreeRestore PyTreeSave StandardRestore
        StandardSave register_with_handler
    """,
    "checkpoint_managers": "AnySavePolicy BestN FixedIntervalPolicy LatestN",
    "checkpoint_utils": "checkpoints_iterator construct_restore_args",
    "handlers": "DefaultCheckpointHandlerRegistry",
    "options": "FileOptions MultiprocessingOptions",
    "path.step": "NameFormat standard_name_format",
    "type_handlers": "ArrayHandler TypeHandler register_type_handler",
    "utils": "checkpoint_steps to_shape_dtype_struct",
    "v1": """
        Context PLACEHOLDER checkpointables_metadata handlers is_orbax_checkpoint load load_async load_checkpointables
        metadata options save save_async save_checkpointables training
    """,
    "v1.training": "CheckpointMetadata Checkpointer preservation_policies save_decision_policies",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_that_clients_use(module: str) -> None:
    found = ckpt_orbax
    for part in filter(None, module.split(".")):
        found = getattr(found, part)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []
    if module != "v1.training":
        assert importlib.import_module(f"ckpt_orbax.{module}".rstrip(".")) is found


@pytest.mark.parametrize("module", ["ckpt_orbax", "ckpt_orbax.args", "ckpt_orbax.v1"])
def test_any_other_name_is_refused(module: str) -> None:
    with pytest.raises(AttributeError, match="docs/moving_from_orbax"):
        getattr(importlib.import_module(module), "NoSuchName")  # noqa: B009
    with pytest.raises(ImportError, match="docs/moving_from_orbax"):
        exec(f"from {module} import NoSuchName")
    with pytest.raises(ImportError, match=r"Instead: ckpt_core\.writer"):
        exec("from ckpt_orbax.v1 import partial")


def test_the_version_is_one_of_orbax() -> None:
    theirs = pytest.importorskip("orbax.checkpoint")
    assert ckpt_orbax.__version__.split(".")[:2] == theirs.__version__.split(".")[:2]
