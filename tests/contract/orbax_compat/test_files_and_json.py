"""Items of files and of plain values beside a tree: Orbax's readers read or pass them over."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)
from tests.support.orbax_routes import (
    ROUTES,
    abstract,
    assert_same,
    named,
    v0_no_args,
    v1_load_checkpointables,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

TREE = {"a": jnp.arange(4.0), "b": {"c": jnp.ones((2, 2))}}
CONFIG = {"layers": [1, None, "ü"], "rate": 0.5}


@pytest.fixture(name="root")
def make_root(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "vocabulary.txt").write_text("a b c")
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        files = ckpt.Files(tmp_path / "source")
        checkpointer.save(7, state=TREE, assets=files, config=ckpt.Json(CONFIG))
    return tmp_path / "run"


@pytest.mark.parametrize("route", named(ROUTES))
def test_the_tree_beside_them(route, root: Path):
    if route not in (v0_no_args, v1_load_checkpointables):
        assert_same(route(root, 7, "state", abstract(TREE)), TREE, sharding=True)
    got = route(root, 7, "state", None)
    assert_same(got, TREE, numpy_as_jax=route.__name__.startswith("v0"))


def test_v0_reads_the_values(root: Path):
    with ocp.CheckpointManager(root) as manager:
        everything = manager.restore(7)
        assert everything["config"] == CONFIG
        assert everything["assets"]["files"] == {"vocabulary.txt": 5}
        args = ocp.args.Composite(config=ocp.args.JsonRestore())
        assert manager.restore(7, args=args)["config"] == CONFIG


def test_v1_reads_the_values(root: Path):
    assert ocp_v1.load_checkpointables(root / "7")["config"] == CONFIG
    assert ocp_v1.load_checkpointables(root / "7", {"config": None})["config"] == CONFIG


def test_a_directory_that_a_handler_of_someone_wrote_is_files(tmp_path: Path):
    """Orbax's step with an item of an unknown handler, which wrote files of its own."""
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave(TREE)))
    step = tmp_path / "run" / "0"
    (step / "assets" / "deep").mkdir(parents=True)
    (step / "assets" / "deep" / "stats").write_bytes(b"1 2")
    described = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    described["item_handlers"]["assets"] = "somebody.CallbackHandler"
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(described))
    found = ckpt.load(step)
    assert found["assets"].names() == ["deep/stats"]
    assert found["assets"].read("deep/stats") == b"1 2"
    assert ckpt.inspect(step).items["assets"].files == {"deep/stats": 3}
    copied = found["assets"].copy_to(tmp_path / "out")
    assert (copied / "deep" / "stats").read_bytes() == b"1 2"
