"""Transfers from an accelerator, on CPU devices which pretend to be one: they have the same kinds of memory."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._devices import transfer
from ckpt_core.testing import assert_same
from tests.support.meshes import explicit_mesh

PLACES = ("host", "device", "pinned_host")
PUT = jax.device_put
Sent = list[tuple[str, int]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Makes devices accelerators; gets the memory kind and size of each transfer to the host."""
    found: Sent = []

    def put(arrays: Any, targets: Any, **arguments: Any) -> Any:
        for array, target in zip(*map(jax.tree.leaves, (arrays, targets)), strict=True):
            found.append((target.memory_kind, array.nbytes))
        return PUT(arrays, targets, **arguments)

    def page_locked(device: Any) -> Any:
        return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_put", put)
    monkeypatch.setattr(transfer, "_page_locked", page_locked)
    return found


def full(*_: Any, **__: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def spread(shape: tuple[int, ...], value: float = 1.0, kind: str = "device") -> Any:
    mesh = explicit_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"), memory_kind=kind)
    return PUT(np.full(shape, value, np.float32), sharding)


def pinned() -> Any:
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return PUT(jnp.arange(1000.0), there)


def mixed() -> Any:
    """31 shards, of all sorts."""
    return {
        "small": [jnp.full((5,), n) for n in range(20)],
        "large": jnp.arange(40_000.0),
        "sharded": spread((8, 8)),
        "key": jax.random.key(3),
        "numpy": np.arange(9),
        "empty": jnp.zeros((0, 3)),
    }


def of_one_device(count: int) -> list[Any]:
    """A program of arrays that have a mesh of explicit axes runs in no other."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    return [PUT(np.arange(4, dtype=np.float32) + n, sharding) for n in range(count)]


KINDS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint8", "int8", "bool")


def alike_of_all_kinds(shape: tuple[int, ...]) -> Any:
    """70 of each of 8 kinds, of any bits: NaNs that signal and those with a payload are among them."""
    random = np.random.default_rng(len(shape))

    def one(kind: str) -> Any:
        dtype = np.dtype(jnp.dtype(kind))
        size_bytes = max(1, int(np.prod(shape))) * dtype.itemsize
        bits = random.integers(0, 2 if kind == "bool" else 256, size_bytes, np.uint8)
        return jnp.asarray(bits.view(dtype).reshape(shape))

    return {kind: [one(kind) for _ in range(70)] for kind in KINDS}


def unlike() -> Any:
    """Too few, too large, or without plain bits."""
    return {
        "few": [jnp.full(3, float(n)) for n in range(63)],
        "large": [jnp.full(16_385, float(n)) for n in range(64)],
        "int4": [jnp.full(8, n % 8, "int4") for n in range(64)],
        "complex": [jnp.full(3, n * 1j) for n in range(64)],
        "empty": [jnp.zeros((0, 3)) for _ in range(64)],
    }


TREES: dict[str, tuple[Callable[[], Any], int]] = {  # transfers: 64 arrays of one kind are one
    "of all sorts": (mixed, 31),
    "alike, scalars": (lambda: alike_of_all_kinds(()), 8 * (1 + 6)),
    "alike, vectors": (lambda: alike_of_all_kinds((3,)), 8 * (1 + 6)),
    "alike, matrices": (lambda: alike_of_all_kinds((2, 5)), 8 * (1 + 6)),
    "unlike": (unlike, 63 + 4 * 64),
    # the kinds with the most arrays are copied together: a first save compiles no more than 8 programs
    "of many kinds": (
        lambda: [[jnp.zeros(length) for _ in range(64 + length)] for length in range(1, 11)],
        sum(1 + length for length in range(3, 11)) + 65 + 66,
    ),
    "of 8 devices": (lambda: [spread((8, 2), n if n % 2 else np.nan) for n in range(64)], 8),
    "few of a mesh of one device": (lambda: of_one_device(3), 3),
    "64 of a mesh of one device": (lambda: of_one_device(64), 1),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TREES)
def test_what_is_sent(tmp_path, sent, name, place):
    """Through page-locked memory, in one call; and what the caller has set or deletes does not matter."""
    make, transfers = TREES[name]
    tree, want = make(), make()
    sent.clear()
    inside = "device" in name and place != "host"
    mesh = jax.tree.leaves(tree)[0].sharding.mesh if inside else None
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext(), jax.debug_nans(True):
        pending = ckpt.save_async(tmp_path / "a", tree, options=ckpt.Options(snapshot=place))
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        pending.result()
    # of what is staged in that memory already, device_put gives the same array
    times = 2 if place == "pinned_host" else 1
    assert [kind for kind, _ in sent] == ["pinned_host"] * transfers * times
    assert_same(ckpt.load(tmp_path / "a"), want)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little page-locked memory may be taken."""
    monkeypatch.setattr(transfer, "_MOST_PAGE_LOCKED_BYTES", 1000)
    monkeypatch.setattr(transfer, "_AT_A_TIME_BYTES", 500)


@pytest.mark.usefixtures("sent", "little")
@pytest.mark.parametrize("place", PLACES)
def test_no_more_stays_there_than_a_limit(tmp_path, monkeypatch, place):
    """What is above it goes through the same memory some at a time: each array is let go before the next is sent."""
    groups: list[tuple[int, bool]] = []
    grouped = transfer._groups

    def counted(arrays: Any, names: Any) -> Any:
        for group, stays in grouped(arrays, names):
            groups.append((sum(arrays[name].nbytes for name in group), stays))
            yield group, stays
            owned = [arrays[name].base is None for name in group if arrays[name].size]
            assert stays or all(owned), "the host array is a view of page-locked memory"

    monkeypatch.setattr(transfer, "_groups", counted)
    tree = mixed()
    ckpt.save_async(tmp_path / "a", tree, options=ckpt.Options(snapshot=place)).result()
    assert [stays for _, stays in groups] == [True] + [False] * (len(groups) - 1)
    assert groups[0][0] <= 1000
    large = tree["large"].nbytes
    assert all(size_bytes <= 500 or size_bytes == large for size_bytes, _ in groups[1:])
    assert_same(ckpt.load(tmp_path / "a"), tree)


@pytest.mark.usefixtures("little")
def test_without_room_there_arrays_are_fetched_plainly(tmp_path, sent, monkeypatch):
    def asked(*_: Any, **__: Any) -> Any:
        sent.append(("full", 0))
        full()

    tree, want = mixed(), mixed()
    sent.clear()
    monkeypatch.setattr(jax, "device_put", asked)
    ckpt.save(tmp_path / "a", tree)
    assert sent == [("full", 0)], "it asked again, and jax waits 10 seconds each time"
    monkeypatch.undo()
    assert_same(ckpt.load(tmp_path / "a"), want)


def test_a_device_without_room_for_stacks_sends_each(tmp_path, sent, monkeypatch):
    monkeypatch.setattr(transfer, "_stack", full)
    tree = [jnp.full(3, float(n)) for n in range(64)]
    ckpt.save(tmp_path / "a", tree)
    assert len(sent) == 64
    assert_same(ckpt.load(tmp_path / "a"), tree)


@pytest.mark.usefixtures("sent", "little")
def test_without_such_memory_nothing_is_copied_twice(monkeypatch):
    monkeypatch.setattr(transfer, "_page_locked", lambda *_: None)
    arrays: dict[Any, Any] = {n: jnp.arange(100.0) for n in range(10)}
    places = {n: array.unsafe_buffer_pointer() for n, array in arrays.items()}
    transfer.bring_to_host(arrays, staged=False)
    assert {n: array.ctypes.data for n, array in arrays.items()} == places


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.usefixtures("sent")
def test_arrays_that_are_offloaded_there_are_copied(monkeypatch, room):
    """A view of the caller's own buffer would change with it, or keep a step from donating it."""
    offloaded = [pinned(), pinned()]
    if not room:
        monkeypatch.setattr(jax, "device_put", full)
    arrays: dict[Any, Any] = dict(enumerate(offloaded))
    transfer.bring_to_host(arrays, staged=False)
    for name, one in enumerate(offloaded):
        np.testing.assert_array_equal(arrays[name], np.arange(1000.0))
        assert arrays[name].ctypes.data != one.unsafe_buffer_pointer()


@pytest.mark.usefixtures("sent")
def test_copies_that_are_there_already_are_not_copied_again():
    array = pinned()
    arrays: dict[Any, Any] = {0: array}
    transfer.bring_to_host(arrays, staged=True)
    assert arrays[0].ctypes.data == array.unsafe_buffer_pointer()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("sent")
def test_shardings_and_kinds_of_memory_come_back(tmp_path, place):
    tree = [jnp.arange(9.0), spread((8, 8)), spread((8, 8), np.nan, "pinned_host"), pinned()]
    with jax.set_mesh(explicit_mesh((8,), ("x",))), jax.debug_nans(True):
        ckpt.save_async(tmp_path / "a", tree, options=ckpt.Options(snapshot=place)).result()
    loaded: Any = ckpt.load(tmp_path / "a")
    assert_same(loaded, tree)
    assert [one.sharding for one in loaded] == [one.sharding for one in tree]
