"""Steps that share the files of what did not change: how much is written, and that each is whole."""

import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ckpt_core as ckpt
from tests.support.units import MIB

SMALL_FILES = ckpt.Options(target_data_file_bytes=4 * MIB, durable=False)


def leaf(seed: float, size: int = MIB // 4) -> Any:
    """A leaf of 1 MiB (by default) that no other seed gives."""
    return jnp.arange(size, dtype=jnp.float32) + seed * size


def frozen_tree(count: int = 20) -> dict[str, Any]:
    return {f"layer{i:02}": {"w": leaf(i), "b": jnp.full(3, i)} for i in range(count)}


def changed(tree: dict[str, Any], *numbers: int) -> dict[str, Any]:
    """The tree with other layers in a few places; the rest are the very same objects."""
    names = {f"layer{i:02}" for i in numbers}
    return {
        name: jax.tree.map(lambda x: x + 0.5, layer) if name in names else layer
        for name, layer in tree.items()
    }


def files(path: Path) -> dict[str, os.stat_result]:
    return {str(p.relative_to(path)): p.stat() for p in path.rglob("*") if p.is_file()}


def new_bytes(path: Path, *others: Path) -> int:
    """Bytes of the files of a step that none of the others has."""
    known = {status.st_ino for other in others for status in files(other).values()}
    return sum(s.st_size for s in files(path).values() if s.st_ino not in known)


def shared_bytes(path: Path, other: Path) -> int:
    return sum(s.st_size for s in files(path).values()) - new_bytes(path, other)


def same(one: Any, other: Any) -> bool:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def assert_whole(path: Path, tree: Any) -> None:
    report = ckpt.verify(path)
    assert report.ok, report.problems
    assert same(ckpt.load(path), tree)


def save_all(directory: Path, *trees: Any, **arguments: Any) -> list[Path]:
    """Saves steps with one Checkpointer; gives their directories."""
    arguments.setdefault("options", SMALL_FILES)
    with ckpt.Checkpointer(directory, **arguments) as checkpointer:
        for step, tree in enumerate(trees):
            checkpointer.save(step, tree)
    return [directory / str(step) for step in range(len(trees))]


def test_little_is_written_of_a_tree_of_which_little_changed(tmp_path):
    tree = frozen_tree(100)
    after = changed(tree, 37)
    first, second = save_all(tmp_path, tree, after, options=ckpt.Options())
    assert new_bytes(first) > 100 * MIB
    assert new_bytes(second, first) < new_bytes(first) / 20
    assert all(s.st_nlink == 2 for s in files(second).values() if s.st_size > 2 * MIB)
    assert_whole(first, tree)
    assert_whole(second, after)


def test_a_chain_of_steps_stays_flat_and_mostly_alive(tmp_path):
    """The usual case, a few trained leaves beside many frozen ones."""
    trees = [frozen_tree()]
    for step in range(1, 12):
        trees.append(
            changed(trees[-1], *((19,) if step < 4 else (2 * step % 20, 2 * step % 20 + 1)))
        )
    steps = save_all(tmp_path, *trees)
    for before, step in itertools.pairwise(steps):
        assert new_bytes(step, before) < 15 * MIB  # never everything
        assert max(name.count("/") for name in files(step)) <= 5, "it grows deeper by each step"
    for step in steps[:-1]:
        shutil.rmtree(step)
    assert_whole(steps[-1], trees[-1])


def test_an_array_whose_memory_the_user_changes(tmp_path):
    tree = frozen_tree()
    memory = np.empty(MIB // 4 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    mine = memory[start : start + MIB // 4]
    mine[:] = 1
    tree["aliased"] = {"w": jax.device_put(mine), "b": jnp.ones(3)}
    with ckpt.Checkpointer(tmp_path, options=SMALL_FILES, asynchronous=False) as checkpointer:
        checkpointer.save(0, tree)
        mine[-1] = 2
        assert tree["aliased"]["w"][-1] == 2, "jax has copied it: this test tests nothing"
        checkpointer.save(1, tree)
    assert ckpt.load(tmp_path / "0")["aliased"]["w"][-1] == 1
    assert_whole(tmp_path / "1", tree)
    assert shared_bytes(tmp_path / "1", tmp_path / "0") > 12 * MIB


@pytest.mark.parametrize("donate", [True, False])
def test_what_a_jitted_function_passed_through(tmp_path, donate):
    """It comes back as other objects; the bytes are compared then."""
    step = jax.jit(
        lambda tree, x: {**tree, "trained": tree["trained"] + x}, donate_argnums=0 if donate else ()
    )
    tree = {"frozen": [leaf(i) for i in range(12)], "trained": leaf(50)}
    with ckpt.Checkpointer(tmp_path, options=SMALL_FILES, asynchronous=False) as checkpointer:
        for number in range(4):
            checkpointer.save(number, tree)
            kept = jax.tree.map(np.array, tree)
            assert_whole(tmp_path / str(number), kept)
            if number:
                previous = tmp_path / str(number - 1)
                assert new_bytes(tmp_path / str(number), previous) < 2 * MIB
            tree = step(tree, 1.0)


def test_frozen_leaves_between_changing_ones_are_linked_from_the_third_step_on(tmp_path):
    """As with adapters beside each layer's weights: the second step writes the frozen ones into other files than the rest."""
    trees = [frozen_tree()]
    for _ in range(3):
        trees.append(changed(trees[-1], *range(0, 20, 2)))
    told = list[int]()
    hears = lambda event: told.append(event.bytes) if event.kind == "committed" else None  # noqa: E731
    options = ckpt.Options(durable=False, on_event=hears)
    paths = save_all(tmp_path, *trees, options=options)
    assert [size // MIB for size in told] == [20, 20, 10, 10]
    frozen = [shared_bytes(path, before) // MIB for before, path in itertools.pairwise(paths)]
    assert frozen == [0, 10, 10]
    for path, tree in zip(paths, trees, strict=True):
        assert_whole(path, tree)


def test_one_bit_in_the_last_place_of_another_object(tmp_path):
    tree = {f"w{i}": leaf(i, 2 * MIB) for i in range(4)}  # 8 MiB each: more than a block
    almost = np.array(tree["w2"])
    almost.view(np.uint32)[-1] ^= 1
    after = {**{name: jnp.array(value) for name, value in tree.items()}, "w2": jnp.array(almost)}
    first, second = save_all(tmp_path, tree, after)
    assert shared_bytes(second, first) > 20 * MIB
    assert_whole(first, tree)
    assert_whole(second, after)


ZEROS = {"a": jnp.zeros((MIB,), jnp.int32), "b": jnp.zeros((MIB,))}
OTHERS = {"a": jnp.zeros((MIB,), jnp.uint32), "b": jnp.zeros((2, MIB // 2))}
SMALL = {"w": jnp.ones(1000), "step": 3}


@pytest.mark.parametrize(
    ("one", "two", "options"),
    [
        (frozen_tree(3), changed(frozen_tree(3), 0, 1, 2), SMALL_FILES),  # of the same shapes
        (ZEROS, OTHERS, SMALL_FILES),  # of another dtype, another shape
        (SMALL, SMALL, SMALL_FILES),
        (frozen_tree(3), frozen_tree(3), ckpt.Options(link_unchanged=False)),
    ],
    ids=["values", "dtypes and shapes", "small files", "switched off"],
)
def test_what_shares_nothing(tmp_path, one, two, options):
    first, second = save_all(tmp_path, one, two, options=options)
    assert shared_bytes(second, first) == 0
    assert_whole(second, two)


def test_leaves_that_come_and_go(tmp_path):
    """A key that a later step lacks does not come back out of an older index."""
    one = frozen_tree()
    two = {name: layer for name, layer in one.items() if name != "layer07"}
    three = two | {"layer99": {"w": leaf(99), "b": jnp.ones(3)}}
    four = {name: {"w": layer["w"]} for name, layer in three.items()}
    steps = save_all(tmp_path, one, two, three, four)
    for step, tree in zip(steps, (one, two, three, four), strict=True):
        assert {leaf.path for leaf in ckpt.inspect(step).items["state"].leaves} == {
            f"{name}/{key}" for name, layer in tree.items() for key in layer
        }
        assert_whole(step, tree)
    assert shared_bytes(steps[3], steps[2]) > 12 * MIB


def test_several_items(tmp_path):
    base, adapter = frozen_tree(), {"w": leaf(99)}
    with ckpt.Checkpointer(tmp_path, options=SMALL_FILES) as checkpointer:
        checkpointer.save(0, base=base, count={"n": 0})
        checkpointer.save(1, base=base, adapter=adapter, count={"n": 1})
        checkpointer.save(2, adapter=adapter, base=base, count={"n": 2})
    expected = {"base": base, "adapter": adapter, "count": {"n": 2}}
    assert shared_bytes(tmp_path / "2", tmp_path / "1") > 20 * MIB
    shutil.rmtree(tmp_path / "1")
    assert same(ckpt.load(tmp_path / "2"), expected)
    assert ckpt.verify(tmp_path / "2").ok
    assert same(ckpt.load(tmp_path / "2", item="base"), base)


def test_sharded_arrays(tmp_path, mesh):
    def put(value: Any, *spec: Any) -> Any:
        return jax.device_put(value, NamedSharding(mesh, P(*spec)))

    tree = {
        "rows": put(leaf(1, 2 * MIB).reshape(2048, 1024), "data", "model"),
        "all": put(leaf(2), None),
        "part": put(leaf(3, MIB).reshape(1024, 1024), "model"),
    }
    after = tree | {"all": tree["all"] + 1}
    first, second = save_all(tmp_path, tree, after)
    assert shared_bytes(second, first) > 7 * MIB
    assert_whole(second, after)
    other = {**after, "part": put(after["part"], "data")}  # the same values in other chunks
    with ckpt.Checkpointer(tmp_path, options=SMALL_FILES) as checkpointer:
        checkpointer.save(2, after)
        checkpointer.save(3, other)
    assert_whole(tmp_path / "3", other)


def test_compressed_leaves(tmp_path):
    """The same codec: shared. Another one: written again."""
    options = ckpt.Options(compression={"layer0*/w": "zstd"}, target_data_file_bytes=4 * MIB)
    tree = frozen_tree()
    first, second = save_all(tmp_path, tree, changed(tree, 3, 15), options=options)
    assert shared_bytes(second, first) > 8 * MIB
    assert_whole(second, changed(tree, 3, 15))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_reads_it(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = frozen_tree()
    after = changed(changed(tree, 3), 5)
    steps = save_all(tmp_path, tree, changed(tree, 3), after)
    assert (steps[2] / "state" / "ocdbt.linked").is_dir()
    for step in steps[:2]:
        shutil.rmtree(step)
    with ocp.StandardCheckpointer() as reader:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, after)
        assert same(reader.restore(steps[2] / "state", abstract), after)
    assert same(ocp.v1.load(steps[2]), after)


def test_retention_and_trash(tmp_path):
    options = ckpt.Options(target_data_file_bytes=4 * MIB, trash_directory="trash")
    trees = [frozen_tree()]
    for step in range(1, 5):
        trees.append(changed(trees[-1], step))
    steps = save_all(tmp_path, *trees, max_to_keep=1, options=options)
    assert [step.exists() for step in steps] == [False] * 4 + [True]
    assert_whole(steps[4], trees[4])
    for step in range(4):
        assert_whole(tmp_path / "trash" / str(step), trees[step])
    shutil.rmtree(tmp_path / "trash")
    assert_whole(steps[4], trees[4])
    assert all(status.st_nlink == 1 for status in files(steps[4]).values())


def test_overwriting_the_step_that_is_linked(tmp_path):
    tree = frozen_tree()
    with ckpt.Checkpointer(tmp_path, options=SMALL_FILES) as checkpointer:
        checkpointer.save(0, tree)
        for number in (3, 4):
            tree = changed(tree, number)
            checkpointer.save(0, tree, overwrite=True)
        checkpointer.wait_until_finished()
        assert_whole(tmp_path / "0", tree)
        assert len(files(tmp_path / "0")) < 40
        checkpointer.save(1, tree)
    shutil.rmtree(tmp_path / "0")
    assert_whole(tmp_path / "1", tree)


def largest(step: Path) -> Path:
    return max(step.rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)


def _delete_a_file(step: Path) -> None:
    largest(step).unlink()


def _replace(step: Path) -> None:
    shutil.move(step, step.parent / "elsewhere")
    ckpt.save(step, frozen_tree(21))


def _copy(step: Path) -> None:
    shutil.move(step, step.parent / "elsewhere")
    shutil.copytree(step.parent / "elsewhere", step)


def _touch(step: Path) -> None:
    file = largest(step)
    with open(file, "r+b") as opened:
        opened.write(b"?")
    os.utime(file, (1, 1))


def _symlinks(step: Path) -> None:
    for file in list((step / "state").rglob("ocdbt.process_0/d/*")):
        moved = file.rename(step.parent / f"moved-{file.name}")
        file.symlink_to(moved)


@pytest.mark.parametrize(
    "happened", [shutil.rmtree, _delete_a_file, _replace, _copy, _touch, _symlinks]
)
def test_what_happened_to_the_last_step_meanwhile(tmp_path, happened):
    """Whatever it was, the new step is written whole, and no error is raised."""
    tree = frozen_tree()
    options = ckpt.Options(target_data_file_bytes=64 * MIB)
    with ckpt.Checkpointer(tmp_path / "run", options=options) as checkpointer:
        checkpointer.save(0, tree)
        checkpointer.wait_until_finished()
        happened(tmp_path / "run" / "0")
        checkpointer.save(1, tree)
        checkpointer.wait_until_finished()
        assert all(s.st_nlink == 1 for s in files(tmp_path / "run" / "1").values())
        checkpointer.save(2, tree)  # and the next one may share again
    assert_whole(tmp_path / "run" / "1", tree)
    assert_whole(tmp_path / "run" / "2", tree)
    assert shared_bytes(tmp_path / "run" / "2", tmp_path / "run" / "1") > 12 * MIB


@pytest.mark.parametrize(
    ("number", "at"), [(errno.EXDEV, 0), (errno.EPERM, 3), (errno.EMLINK, 3), (errno.ENOTSUP, 0)]
)
def test_file_systems_that_refuse_links(tmp_path, monkeypatch, number, at):
    tree, link, calls = frozen_tree(), os.link, []

    def refuse(source: str, target: str, **arguments: Any) -> None:
        calls.append(target)
        if len(calls) > at:
            raise OSError(number, os.strerror(number), source, None, target)
        link(source, target, **arguments)

    monkeypatch.setattr(os, "link", refuse)
    first, second = save_all(tmp_path, tree, changed(tree, 4))
    assert len(calls) == at + 1
    assert shared_bytes(second, first) == 0
    assert not (second / "state" / "ocdbt.linked").exists()
    assert_whole(second, changed(tree, 4))


def test_damage_in_a_shared_file_is_found_in_every_step(tmp_path):
    tree = frozen_tree()
    first, second = save_all(tmp_path, tree, changed(tree, 4))
    for name, status in files(second).items():
        if status.st_nlink == 1 and "linked" in name:
            pytest.fail(f"{name} is not shared")
        if status.st_size == 0:
            continue
        file = second / name
        whole = file.read_bytes()
        for position in {0, len(whole) // 2, len(whole) - 1}:
            damaged = bytearray(whole)
            damaged[position] ^= 4
            with open(file, "r+b") as opened:  # in place: the other step has the same file
                opened.write(damaged)
            assert not ckpt.verify(second).ok, (name, position)
            assert ckpt.verify(first).ok == (status.st_nlink == 1), (name, position)
        with open(file, "r+b") as opened:
            opened.write(whole)
    assert_whole(first, tree)
    assert_whole(second, changed(tree, 4))


@pytest.mark.filterwarnings("ignore:.*damaged and skipped")
@pytest.mark.parametrize(
    "meet",
    [
        lambda checkpointer, tree: checkpointer.restore_latest(state=tree),
        lambda checkpointer, tree: checkpointer.restore(0, state=tree),
        lambda checkpointer, tree: checkpointer.load(0),
    ],
)
def test_known_damage_is_not_handed_on(tmp_path, meet):
    """The very objects are saved again after their file was found damaged: it is not shared."""
    tree = frozen_tree()
    with ckpt.Checkpointer(tmp_path, options=SMALL_FILES, asynchronous=False) as checkpointer:
        checkpointer.save(0, tree)
        file = largest(tmp_path / "0")
        before = file.stat()
        with open(file, "r+b") as opened:
            opened.seek(MIB)
            opened.write(b"rot")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # a bad sector tells no one
        with pytest.raises(ckpt.CheckpointCorrupt):
            meet(checkpointer, tree)
        checkpointer.save(1, tree)
        checkpointer.save(2, tree)
    assert_whole(tmp_path / "1", tree)
    assert (tmp_path / "2" / "state" / "ocdbt.linked").exists()  # of what was written anew
    assert_whole(tmp_path / "2", tree)


def test_large_files_are_digested_anew_where_less_of_them_is_needed(tmp_path):
    """What checksums no longer cover has to be in the digest: the file is over 32 MiB."""
    tree = {f"w{i}": leaf(i, 2 * MIB) for i in range(6)}  # 48 MiB in one file
    two = tree | {"w3": tree["w3"] + 1}
    first, *later = save_all(tmp_path, tree, two, two | {"more": jnp.ones(3)}, options=None)
    assert all(ckpt.verify(step).ok for step in (first, *later))
    file = largest(first)
    dead = file.read_bytes().index(np.asarray(tree["w3"]).tobytes()[:4096]) + 1000
    shared = [one for step in later for one in step.rglob(file.name)]
    assert len(shared) == 2 and all(one.samefile(file) for one in shared)
    with open(file, "r+b") as opened:
        opened.seek(dead)
        byte = opened.read(1)
        opened.seek(dead)
        opened.write(bytes([byte[0] ^ 1]))
    assert not any(ckpt.verify(step).ok for step in (first, *later))
