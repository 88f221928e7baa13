"""The names of Orbax that the page of the API lists; and ``Context``: which options are taken, which are refused."""

import importlib
import re
import threading

import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_orbax
from ckpt_orbax import NotOffered, pathways, v1 as ocp
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "api" / "orbax.md").read_text()
NAMES = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"^\| `ckpt_orbax\.?([\w.]*)` \| (.*) \|$", PAGE, re.MULTILINE)
}


@pytest.mark.parametrize("module", NAMES)
def test_names_that_clients_use(module):
    found = ckpt_orbax
    for part in filter(None, module.split(".")):
        found = getattr(found, part)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []
    assert NAMES[module] and len(NAMES) >= 11
    if module != "v1.training":
        assert importlib.import_module(f"ckpt_orbax.{module}".rstrip(".")) is found


@pytest.mark.parametrize("module", ["ckpt_orbax", "ckpt_orbax.args", "ckpt_orbax.v1"])
def test_any_other_name_is_refused(module):
    with pytest.raises(AttributeError, match="docs/api/orbax"):
        getattr(importlib.import_module(module), "NoSuchName")  # noqa: B009
    with pytest.raises(ImportError, match="docs/api/orbax"):
        exec(f"from {module} import NoSuchName")
    with pytest.raises(ImportError, match=r"Instead: ckpt_core\.writer"):
        exec("from ckpt_orbax.v1 import partial")


def test_the_version_is_one_of_orbax():
    theirs = pytest.importorskip("orbax.checkpoint")
    assert ckpt_orbax.__version__.split(".")[:2] == theirs.__version__.split(".")[:2]


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
