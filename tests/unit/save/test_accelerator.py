"""Transfers from an accelerator, on CPU devices which pretend to be one: they have the same kinds of memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._devices import alike, transfer
from tests.support.meshes import explicit_mesh

PLACES = ("host", "device", "pinned_host")
PUT = jax.device_put


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Makes devices accelerators; gets the memory kind and size of each transfer to the host."""
    found: list[tuple[str, int]] = []

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


def state() -> dict[str, Any]:
    sharded = jax.sharding.NamedSharding(explicit_mesh((8,), ("x",)), jax.P("x"))
    return {
        "small": [jnp.full((5,), n) for n in range(20)],
        "large": jnp.arange(40_000.0),
        "sharded": PUT(np.arange(64.0).reshape(8, 8), sharded),
        "key": jax.random.key(3),
        "numpy": np.arange(9),
        "empty": jnp.zeros((0, 3)),
    }


def values(tree: Any) -> list[Any]:
    leaves = [
        jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
        for leaf in jax.tree.leaves(tree)
    ]
    return [np.array(leaf) for leaf in leaves]


def saved(path: Path, tree: Any, place: Any) -> None:
    """Saves, and donates the arrays at once."""
    pending = ckpt.save_async(path, tree, options=ckpt.Options(snapshot=place))
    double = jax.jit(lambda leaf: leaf * 2, donate_argnums=0)
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 and leaf.size:
            jax.block_until_ready(double(leaf))
    pending.result()


def assert_saved(path: Path, want: list[Any]) -> None:
    for one, other in zip(values(ckpt.load(path)), want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("place", PLACES)
def test_arrays_pass_through_page_locked_memory(
    tmp_path: Path, sent: list[tuple[str, int]], place: str
) -> None:
    tree = state()
    want = values(tree)
    sent.clear()
    saved(tmp_path / "a", tree, place)
    shards = 20 + 1 + 8 + 1 + 1
    puts = [kind for kind, _ in sent]
    # of what is staged in that memory already, device_put gives the same array
    assert puts == ["pinned_host"] * shards * (2 if place == "pinned_host" else 1)
    assert_saved(tmp_path / "a", want)


@pytest.mark.parametrize("place", ["host", "device"])
def test_one_call_sends_all(
    tmp_path: Path, sent: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, place: Any
) -> None:
    """What is sent after the caller's next step was enqueued is sent when that has ended."""
    calls: list[int] = []
    counted = jax.device_put

    def put(arrays: Any, targets: Any, **arguments: Any) -> Any:
        calls.append(len(jax.tree.leaves(arrays)))
        return counted(arrays, targets, **arguments)

    tree = [jnp.full((n + 1,), n, jnp.float32) for n in range(40)]
    want = values(tree)
    monkeypatch.setattr(jax, "device_put", put)
    saved(tmp_path / "a", tree, place)
    assert calls == [40]
    assert_saved(tmp_path / "a", want)


@pytest.mark.parametrize("place", PLACES)
def test_no_more_stays_there_than_a_limit(
    tmp_path: Path, sent: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """What is above it goes through the same memory some at a time: each array is let go before the next is sent."""
    monkeypatch.setattr(transfer, "_MOST_PAGE_LOCKED_BYTES", 1000)
    monkeypatch.setattr(transfer, "_AT_A_TIME_BYTES", 500)
    groups: list[tuple[int, bool]] = []
    grouped = transfer._groups  # pyright: ignore[reportPrivateUsage]

    def counted(arrays: Any, names: Any) -> Any:
        for group, stays in grouped(arrays, names):
            groups.append((sum(arrays[name].nbytes for name in group), stays))
            yield group, stays
            owned = [arrays[name].base is None for name in group if arrays[name].size]
            assert stays or all(owned), "the host array is a view of page-locked memory"

    monkeypatch.setattr(transfer, "_groups", counted)
    tree = state()
    want = values(tree)
    saved(tmp_path / "a", tree, place)
    assert [stays for _, stays in groups] == [True] + [False] * (len(groups) - 1)
    assert groups[0][0] <= 1000
    large = tree["large"].nbytes
    assert all(size_bytes <= 500 or size_bytes == large for size_bytes, _ in groups[1:])
    assert_saved(tmp_path / "a", want)


def test_without_room_there_arrays_are_fetched_plainly(
    tmp_path: Path, sent: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        sent.append(("full", 0))
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of host memory")

    monkeypatch.setattr(transfer, "_MOST_PAGE_LOCKED_BYTES", 1000)
    monkeypatch.setattr(transfer, "_AT_A_TIME_BYTES", 500)
    tree = state()
    want = values(tree)
    sent.clear()
    monkeypatch.setattr(jax, "device_put", full)
    ckpt.save(tmp_path / "a", tree)
    assert sent == [("full", 0)], "it asked again, and jax waits 10 seconds each time"
    monkeypatch.undo()
    assert_saved(tmp_path / "a", want)


@pytest.mark.usefixtures("sent")
def test_without_such_memory_nothing_is_copied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_page_locked", lambda *_: None)
    monkeypatch.setattr(transfer, "_MOST_PAGE_LOCKED_BYTES", 1000)
    arrays: dict[Any, Any] = {n: jnp.arange(100.0) for n in range(10)}
    places = {n: array.unsafe_buffer_pointer() for n, array in arrays.items()}
    transfer.bring_to_host(arrays, [*arrays], staged=False)
    assert {n: array.ctypes.data for n, array in arrays.items()} == places


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("sent")
def test_what_the_caller_has_set_does_not_matter(tmp_path: Path, place: Any, kind: str) -> None:
    """A mesh would place copies on all of its devices, or refuse arrays of one; a NaN of the state is no error."""
    mesh = explicit_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"), memory_kind=kind)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3], memory_kind=kind)
    with jax.set_mesh(mesh), jax.debug_nans(True):
        tree = [jnp.arange(9.0), PUT(np.full((8, 8), np.nan), sharding), PUT(np.ones(5), one)]
        options = ckpt.Options(snapshot=place)
        ckpt.save_async(tmp_path / "async", tree, options=options).result()
        ckpt.save(tmp_path / "sync", tree, options=options)
    for name in ("async", "sync"):
        for array, loaded in zip(tree, ckpt.load(tmp_path / name), strict=True):
            np.testing.assert_array_equal(np.asarray(array), np.asarray(loaded))
            assert array.sharding == loaded.sharding


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.usefixtures("sent")
def test_arrays_that_are_offloaded_there_are_copied(
    monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """A view of the caller's own buffer would change with it, or keep a step from donating it."""
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    array = PUT(jnp.arange(1000.0), pinned)

    def full(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of host memory")

    if not room:
        monkeypatch.setattr(jax, "device_put", full)
    another = PUT(jnp.arange(1000.0), pinned)
    arrays: dict[Any, Any] = {0: array, 1: another}
    transfer.bring_to_host(arrays, [0, 1], staged=False)
    for name, one in enumerate((array, another)):
        np.testing.assert_array_equal(arrays[name], np.arange(1000.0))
        assert arrays[name].ctypes.data != one.unsafe_buffer_pointer()


@pytest.mark.usefixtures("sent")
def test_copies_that_are_there_already_are_not_copied_again() -> None:
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    array = PUT(jnp.arange(1000.0), pinned)
    arrays: dict[Any, Any] = {0: array}
    transfer.bring_to_host(arrays, [0], staged=True)
    assert arrays[0].ctypes.data == array.unsafe_buffer_pointer()


KINDS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint8", "int8", "bool")


def small(count: int, dtype: str, shape: tuple[int, ...]) -> list[Any]:
    """Arrays on the device of all sorts of bits: of floats, NaNs that signal and those with a payload are among them."""
    size = max(1, int(np.prod(shape)))
    random = np.random.default_rng(len(shape))
    made: list[Any] = []
    for _ in range(count):
        dtyped = np.dtype(jnp.dtype(dtype))
        bits = random.integers(0, 2 if dtype == "bool" else 256, size * dtyped.itemsize, np.uint8)
        made.append(jnp.asarray(bits.view(dtyped).reshape(shape)))
    return made


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
@pytest.mark.parametrize("place", PLACES)
def test_small_arrays_of_one_kind_are_sent_together(
    tmp_path: Path, sent: list[tuple[str, int]], place: str, shape: tuple[int, ...]
) -> None:
    """64 of them in one array: a transfer of each costs more than the copy."""
    tree = {kind: small(70, kind, shape) for kind in KINDS}
    assert len(KINDS) <= 8, "of more kinds, some are sent one by one"
    want = {kind: [np.array(leaf).tobytes() for leaf in leaves] for kind, leaves in tree.items()}
    sent.clear()
    pending = ckpt.save_async(tmp_path / "a", tree, options=ckpt.Options(snapshot=place))
    for leaf in jax.tree.leaves(tree):
        leaf.delete()
    pending.result()
    # of what is there already, device_put gives the same
    times = 2 if place == "pinned_host" else 1
    assert len(sent) == len(KINDS) * (1 + 6) * times, "64 in a stack, and 6 by themselves"
    loaded: Any = ckpt.load(tmp_path / "a")
    for kind in KINDS:
        assert [np.array(leaf).tobytes() for leaf in loaded[kind]] == want[kind], kind
        assert {(leaf.shape, str(leaf.dtype)) for leaf in loaded[kind]} == {(shape, kind)}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_too_few_or_large_or_has_no_plain_bits_is_sent_by_itself(
    tmp_path: Path, sent: list[tuple[str, int]], place: str
) -> None:
    tree = {
        "few": [jnp.full(3, float(n)) for n in range(63)],
        "large": [jnp.full(16_385, float(n)) for n in range(64)],
        "int4": [jnp.full(8, n % 8, "int4") for n in range(64)],
        "complex": [jnp.full(3, n * 1j) for n in range(64)],
        "empty": [jnp.zeros((0, 3)) for _ in range(64)],
    }
    want = values(tree)
    sent.clear()
    ckpt.save_async(tmp_path / "a", tree, options=ckpt.Options(snapshot=place)).result()
    assert len(sent) == (63 + 4 * 64) * (2 if place == "pinned_host" else 1)
    assert_saved(tmp_path / "a", want)


def test_no_first_save_compiles_more_than_some_programs(
    tmp_path: Path, sent: list[tuple[str, int]]
) -> None:
    """The kinds with the most arrays are copied together."""
    tree = [[jnp.zeros(length) for _ in range(64 + length)] for length in range(1, 11)]
    sent.clear()
    ckpt.save(tmp_path / "a", tree)
    assert len(sent) == sum(1 + length for length in range(3, 11)) + 65 + 66


@pytest.mark.parametrize("place", PLACES)
def test_a_device_without_room_for_stacks_sends_each(
    tmp_path: Path, sent: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full() -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(alike, "_stack", full)
    tree = [jnp.full(3, float(n)) for n in range(64)]
    want = values(tree)
    sent.clear()
    ckpt.save_async(tmp_path / "a", tree, options=ckpt.Options(snapshot=place)).result()
    assert len(sent) == 64 * (2 if place == "pinned_host" else 1)
    assert_saved(tmp_path / "a", want)


@pytest.mark.parametrize("place", PLACES)
def test_stacks_of_several_devices_under_a_mesh(
    tmp_path: Path, sent: list[tuple[str, int]], place: Any
) -> None:
    mesh = explicit_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    with jax.set_mesh(mesh), jax.debug_nans(True):
        tree = [
            PUT(np.full((8, 2), n if n % 2 else np.nan, np.float32), sharding) for n in range(64)
        ]
        ckpt.save_async(tmp_path / "a", tree, options=ckpt.Options(snapshot=place)).result()
    assert len(sent) == 8 * (2 if place == "pinned_host" else 1)
    assert_saved(tmp_path / "a", values(tree))


@pytest.mark.parametrize("there", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("count", [3, 64])
@pytest.mark.parametrize("place", PLACES)
def test_arrays_of_a_mesh_of_one_device_with_explicit_axes(
    tmp_path: Path, sent: list[tuple[str, int]], place: Any, count: int, there: bool
) -> None:
    """A program of arrays that have such a mesh runs in no other."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    tree = [PUT(np.arange(4, dtype=np.float32) + n, sharding) for n in range(count)]
    with jax.set_mesh(mesh) if there else contextlib.nullcontext():
        ckpt.save_async(tmp_path / "a", tree, options=ckpt.Options(snapshot=place)).result()
    assert len(sent) == (1 if count == 64 else count) * (2 if place == "pinned_host" else 1)
    assert_saved(tmp_path / "a", values(tree))
