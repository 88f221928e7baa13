"""On the CPU a load reads large arrays into memory that XLA owns, so the first step that donates them needs no other."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import ckpt_core as ckpt
from ckpt_core._devices import placing, xla_memory
from ckpt_core.testing import assert_same
from tests.support import children
from tests.support.damage import turn_a_bit
from tests.support.units import MIB

NOT_DURABLE = ckpt.Options(durable=False)
SIDE = 2048
"""A float32 array of this side has 16 MiB; five of them are worth a program that gives memory."""


def numbers(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).random(shape or (SIDE, SIDE), np.float32) - np.float32(0.5)


def five() -> dict[str, Any]:
    return {f"leaf{n}": jnp.asarray(numbers(n, SIDE + n, SIDE)) for n in range(5)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("xla") / "five"
    ckpt.save(path, five(), options=NOT_DURABLE)
    return path


def reuses_memory(array: Any) -> bool:
    """Whether a step that donates the array writes its result where the array was."""
    place = array.unsafe_buffer_pointer()
    step = jax.jit(lambda x: x * 2, donate_argnums=0)
    return step(array).unsafe_buffer_pointer() == place


def test_a_donating_step_reuses_what_was_loaded(saved: Path) -> None:
    loaded = ckpt.load(saved)
    assert_same(loaded, five())
    assert [reuses_memory(leaf) for leaf in loaded.values()] == [True] * 5


def test_memory_of_numpy_is_not_reused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_memory, "_allocated", lambda *_: [])
    loaded = ckpt.load(saved)
    assert_same(loaded, five())
    assert not any(reuses_memory(leaf) for leaf in loaded.values())


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("this version of jax registers nothing")


def test_a_jax_that_registers_no_handler(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xla_memory._program.cache_clear()
    xla_memory._register.cache_clear()
    monkeypatch.setattr(jax.ffi, "register_ffi_target", _refuse)
    assert_same(ckpt.load(saved), five())
    xla_memory._program.cache_clear()


TARGETS = {
    "uncommitted": None,
    "one device": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    "another device": jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    "a mesh of one": jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(jax.devices()[2:3]), ("x",)), jax.sharding.PartitionSpec("x")
    ),
}


@pytest.mark.parametrize("where", TARGETS)
def test_placed_as_before(tmp_path: Path, where: str) -> None:
    sharding = TARGETS[where]
    tree = {f"leaf{n}": jax.device_put(numbers(n), sharding) for n in range(5)}
    ckpt.save(tmp_path / "a", tree, options=NOT_DURABLE)
    for loaded in (ckpt.load(tmp_path / "a"), ckpt.load(tmp_path / "a", tree)):
        assert_same(loaded, tree)
        for name, leaf in tree.items():
            assert loaded[name].sharding == leaf.sharding
            assert loaded[name].committed == leaf.committed
        assert all(map(reuses_memory, loaded.values()))


def test_split_and_replicated_arrays(tmp_path: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    specs = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    tree = {
        f"leaf{n}": jax.device_put(numbers(n), jax.sharding.NamedSharding(mesh, specs[n % 2]))
        for n in range(5)
    }
    ckpt.save(tmp_path / "a", tree, options=NOT_DURABLE)
    assert_same(ckpt.load(tmp_path / "a"), tree)


SOME = ["bfloat16", "uint32", "int4"]
REST = ["bool", "int8", "uint8", "int16", "float16", "float32", "complex64", "float8_e4m3fn"]


@pytest.mark.parametrize(
    "dtype", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)]
)
def test_every_dtype(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-8, 8, (20 * MIB + n,), np.int8) for n in range(4)]
    tree = {f"leaf{n}": jnp.asarray(array).astype(dtype) for n, array in enumerate(arrays)}
    ckpt.save(tmp_path / "a", tree, options=NOT_DURABLE)
    loaded = ckpt.load(tmp_path / "a")
    assert_same(loaded, tree)
    if dtype not in ("bool", "float8_e4m3fn", "int4"):  # a bool times two is none
        assert reuses_memory(loaded["leaf0"])


def test_casts_in_both_directions(saved: Path) -> None:
    for dtype in (jnp.bfloat16, jnp.float16, jnp.int32):
        whole = {name: jnp.round(leaf * 1000) for name, leaf in five().items()}
        if dtype is jnp.int32:
            ckpt.save(saved.parent / "whole", whole, options=NOT_DURABLE, overwrite=True)
        path, tree = (saved.parent / "whole", whole) if dtype is jnp.int32 else (saved, five())
        like = {name: jax.ShapeDtypeStruct(leaf.shape, dtype) for name, leaf in tree.items()}
        loaded = ckpt.load(path, like, cast=True)
        assert_same(loaded, {name: leaf.astype(dtype) for name, leaf in tree.items()})


def test_cast_as_it_is_read(tmp_path: Path) -> None:
    half = {name: leaf.astype(jnp.bfloat16) for name, leaf in five().items()}
    ckpt.save(tmp_path / "half", half, options=NOT_DURABLE)
    like = {name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for name, leaf in half.items()}
    loaded = ckpt.load(tmp_path / "half", like, cast=True)
    assert_same(loaded, {name: leaf.astype(jnp.float32) for name, leaf in half.items()})
    assert reuses_memory(loaded["leaf1"])


def test_values_of_64_bits(tmp_path: Path) -> None:
    """Their setting may be that of a thread, and memory is taken in another one."""
    with jax.enable_x64(True):
        tree = {f"leaf{n}": jnp.asarray(numbers(n).astype(np.float64) / 3) for n in range(3)}
        ckpt.save(tmp_path / "a", tree, options=NOT_DURABLE)
        loaded = ckpt.load(tmp_path / "a")
        assert_same(loaded, tree)
        assert loaded["leaf0"].dtype == np.float64


def test_compressed_and_in_chunks(tmp_path: Path) -> None:
    tree = five() | {"odd": jnp.asarray(numbers(9, 1531, 1009))}
    for name, options in {
        "zstd": ckpt.Options(durable=False, compression="zstd", chunk_bytes=3 * MIB),
        "chunks": ckpt.Options(durable=False, chunk_bytes=3 * MIB),
    }.items():
        ckpt.save(tmp_path / name, tree, options=options)
        assert_same(ckpt.load(tmp_path / name), tree)
        assert_same(ckpt.load(tmp_path / name, options=ckpt.Options(checksums=False)), tree)
        assert_same(ckpt.load(tmp_path / name, options=ckpt.Options(max_host_bytes=MIB)), tree)


def test_a_few_leaves(saved: Path) -> None:
    loaded = ckpt.load(saved, only=["leaf3", "leaf1"])
    assert_same(loaded, {name: five()[name] for name in ("leaf1", "leaf3")})


class Wide(nnx.Module):
    def __init__(self, seed: int) -> None:
        self.layers = nnx.List([nnx.Linear(SIDE, SIDE, rngs=nnx.Rngs(seed + n)) for n in range(5)])


@pytest.mark.parametrize("atomic", [False, True])
def test_into_a_live_model(tmp_path: Path, atomic: bool) -> None:
    model, other = Wide(0), Wide(100)
    ckpt.save(tmp_path / "a", model=model, options=NOT_DURABLE)
    options = ckpt.Options(atomic_restore=atomic, max_host_bytes=32 * MIB)
    ckpt.restore(tmp_path / "a", model=other, options=options)
    assert_same(nnx.to_pure_dict(nnx.state(other)), nnx.to_pure_dict(nnx.state(model)))
    kernel = other.layers[2].kernel
    assert reuses_memory(kernel[...])


def test_what_is_loaded_is_saved_and_trained_on(saved: Path, tmp_path: Path) -> None:
    loaded = ckpt.load(saved)
    pending = ckpt.save_async(tmp_path / "again", loaded, options=NOT_DURABLE)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
    trained = step(loaded)
    pending.result()
    assert_same(ckpt.load(tmp_path / "again"), five())
    assert_same(trained, jax.tree.map(lambda x: x * 2, five()))


def test_nothing_else_stays(saved: Path) -> None:
    gc.collect()
    before = len(jax.live_arrays())
    loaded = ckpt.load(saved)
    assert len(jax.live_arrays()) == before + 5
    held = [weakref.ref(leaf) for leaf in loaded.values()]
    del loaded
    assert [one() for one in held] == [None] * 5
    assert len(jax.live_arrays()) == before


def test_damage_is_found_and_nothing_stays(saved: Path, tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", five(), options=NOT_DURABLE)
    turn_a_bit(tmp_path / "a")
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(ckpt.CheckpointCorrupt, match="checksum"):
        ckpt.load(tmp_path / "a")
    gc.collect()
    assert len(jax.live_arrays()) == before


@pytest.fixture
def checks_for_nan() -> Iterator[None]:
    jax.config.update("jax_debug_nans", True)
    jax.config.update("jax_debug_infs", True)
    yield
    jax.config.update("jax_debug_nans", False)
    jax.config.update("jax_debug_infs", False)


@pytest.mark.usefixtures("checks_for_nan")
def test_memory_that_holds_anything_is_not_checked_for_nan(saved: Path) -> None:
    full = [np.full((SIDE, SIDE), np.nan, np.float32) for _ in range(10)]
    del full  # what is allocated next may be this
    for _ in range(3):
        assert_same(ckpt.load(saved), five())


@pytest.mark.parametrize("setting", ["disable_jit", "log_compiles", "transfer_guard", "mesh"])
def test_settings_of_the_caller(saved: Path, setting: str) -> None:
    auto = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((8,), ("x",), axis_types=(auto,))
    contexts = {
        "disable_jit": lambda: jax.disable_jit(),
        "log_compiles": lambda: jax.log_compiles(),
        "transfer_guard": lambda: jax.transfer_guard("disallow"),
        "mesh": lambda: jax.set_mesh(mesh),
    }
    xla_memory._program.cache_clear()
    with contexts[setting]():
        loaded = ckpt.load(saved)
    assert_same(loaded, five())
    assert reuses_memory(loaded["leaf0"])


GLOBALLY = """
import json, sys
import jax, numpy as np
import ckpt_core as ckpt

jax.config.update("jax_disable_jit", "disable_jit" in sys.argv)
loaded = ckpt.load(sys.argv[1])
place = loaded["leaf0"].unsafe_buffer_pointer()
sums = [float(np.asarray(leaf, np.float64).sum()) for leaf in loaded.values()]
jax.config.update("jax_disable_jit", False)
step = jax.jit(lambda x: x * 2, donate_argnums=0)
print(json.dumps([step(loaded["leaf0"]).unsafe_buffer_pointer() == place, sums]))
"""


@pytest.mark.parametrize("setting", ["none", "disable_jit", "cache"])
def test_in_new_processes(run_python: Any, saved: Path, tmp_path: Path, setting: str) -> None:
    """Without jit; and twice with a cache of compiled programs on disk, of which the second run takes ours."""
    environment = {}
    if setting == "cache":
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    sums = [float(np.asarray(leaf, np.float64).sum()) for leaf in five().values()]
    for _ in range(2 if setting == "cache" else 1):
        assert run_python(GLOBALLY, str(saved), setting, **environment) == [True, sums]
    if setting == "cache":
        assert any(tmp_path.iterdir())


def test_several_threads(saved: Path) -> None:
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(ckpt.load(saved)), name=f"load-{n}")
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    for one in found:
        assert_same(one, five())


class Interrupt(BaseException):
    pass


def _raise(*_: Any) -> None:
    raise Interrupt


def test_interrupts_at_many_moments(saved: Path) -> None:
    """What the handler raises reaches the caller, and the next load is whole."""
    before = signal.signal(signal.SIGALRM, _raise)
    rng, interrupted = random.Random(0), 0
    # Hypothesis measures the garbage collector in a callback of it, in which what a handler raises is dropped.
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        for _ in range(60):
            xla_memory._program.cache_clear()
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.06))
            try:
                ckpt.load(saved)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupted += 1
        assert interrupted > 5
        assert_same(ckpt.load(saved), five())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.callbacks.extend(callbacks)


SHAPES = (((2048,), np.dtype(np.float32)),)


def test_all_allocations_are_made_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the main thread, and not each by another one, for which glibc would keep what was freed."""
    plain, by = xla_memory._allocated, set[int]()

    def noted(*asked: Any) -> Any:
        by.add(threading.get_ident())
        return plain(*asked)

    monkeypatch.setattr(xla_memory, "_allocated", noted)
    for _ in range(3):
        (owned,) = xla_memory.allocate(jax.devices()[0], SHAPES).result()
        owned.view[:] = 3
        assert float(owned.array.sum()) == 3 * 2048
    assert len(by) == 1 and threading.get_ident() not in by


def _starts_no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("start", [_starts_no_thread, lambda *_: 0])
def test_a_thread_that_does_not_start(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    """The system has no more, or it was lost before its first line: nobody waits for it for ever."""
    monkeypatch.setattr(xla_memory, "_allocator", xla_memory._Allocator())
    monkeypatch.setattr(xla_memory._thread, "start_new_thread", start)
    monkeypatch.setattr(xla_memory, "_START_SECS", 0.5)
    assert xla_memory.allocate(jax.devices()[0], SHAPES).result() == []
    monkeypatch.undo()
    (owned,) = xla_memory.allocate(jax.devices()[0], SHAPES).result()  # once it can start again
    assert owned.array.shape == (2048,)


EXIT = """
import os, signal, sys, threading
import jax
import ckpt_core as ckpt
jax.devices()

def stop(*_):
    sys.exit(7)

signal.signal(signal.SIGTERM, stop)
path, secs = sys.argv[1], float(sys.argv[2])
threading.Timer(secs, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
for _ in range(100):
    ckpt.load(path)
"""


@pytest.mark.slow
def test_exit_while_memory_is_allocated(tmp_path: Path) -> None:
    """Python must not end the thread while XLA calls it: that would abort the process."""
    tree = {f"leaf{n}": jnp.zeros((512 + n, 512)) for n in range(200)}
    ckpt.save(tmp_path / "many", tree, options=NOT_DURABLE)
    for turn in range(12):
        arguments = [str(tmp_path / "many"), str(0.02 + 0.02 * turn)]
        ended = subprocess.run(
            [sys.executable, "-c", EXIT, *arguments],
            env=children.environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        # jax itself drops what a handler raises in its callback of the garbage collector
        assert ended.returncode in (0, 7), (turn, ended.returncode, ended.stderr[-2000:])


def test_a_hint_that_fails(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(22, "Invalid argument")

    def cold(*_: Any) -> None:
        raise BlockingIOError(11, "not in the cache")

    plain = os.preadv
    monkeypatch.setattr(os, "posix_fadvise", fails)
    monkeypatch.setattr(os, "preadv", lambda *given: cold() if len(given) > 3 else plain(*given))
    assert_same(ckpt.load(saved), five())


def test_without_the_private_functions_of_jax(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing._fast_path, "get", lambda: None)
    loaded = ckpt.load(saved)
    assert_same(loaded, five())
    assert not any(leaf.committed for leaf in loaded.values())


def test_a_program_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no memory for it")

    monkeypatch.setattr(xla_memory, "_results_of", fails)
    assert xla_memory.allocate(jax.devices()[0], SHAPES).result() == []


# ---- many arrays of few shapes -----------------------------------------------------------------

_shapes = st.lists(
    st.tuples(
        st.sampled_from([(3,), (4, 5), (), (7, 1)]),
        st.sampled_from(["float32", "int8"]).map(np.dtype),
    ),
    max_size=300,
).map(tuple)


@given(_shapes)
def test_programs_give_as_many_of_each_shape_as_are_wanted(shapes: xla_memory.Shapes) -> None:
    programs = xla_memory._split(shapes)
    given_in_all = Counter[Any]()
    for results, times in programs:
        given_in_all += Counter(results * times)
    assert given_in_all == Counter(shapes)
    assert sum(len(results) for results, _ in programs) <= len(shapes)


def test_arrays_that_are_alike_take_small_programs() -> None:
    large, small = ((512, 512), np.dtype("float32")), ((7,), np.dtype("float32"))
    assert xla_memory._split((large,) * 2048) == [((large,) * 32, 64)]
    assert xla_memory._split((large, small) * 96) == [((large,) * 3 + (small,) * 3, 32)]
    assert xla_memory._split((large, small)) == [((large, small), 1)]


def test_many_arrays_of_few_shapes(tmp_path: Path) -> None:
    """The memory of each is its own, and a donating step writes to it."""
    state = {f"{n}": jnp.asarray(numbers(n, 256 + n % 3, 256)) for n in range(331)}
    ckpt.save(tmp_path / "many", state, options=NOT_DURABLE)
    loaded = ckpt.load(tmp_path / "many")
    assert_same(loaded, state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in loaded.values()}) == len(state)
    assert all(reuses_memory(leaf) for leaf in [*loaded.values()][::50])


def test_arrays_that_are_too_small_for_so_many_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To compile a program with a result for each would take longer than it saves."""
    programs: list[Any] = []
    monkeypatch.setattr(xla_memory, "_program", lambda *arguments: programs.append(arguments))
    state = {f"{n}": jnp.asarray(numbers(n, 256 + n, 256)) for n in range(200)}
    ckpt.save(tmp_path / "many", state, options=NOT_DURABLE)
    assert_same(ckpt.load(tmp_path / "many"), state)
    assert programs == []
    alike = {f"{n}": jnp.asarray(numbers(n, 256, 256)) for n in range(300)}
    ckpt.save(tmp_path / "alike", alike, options=NOT_DURABLE)
    assert_same(ckpt.load(tmp_path / "alike"), alike)
    assert programs
