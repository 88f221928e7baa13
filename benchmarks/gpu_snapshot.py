"""Measures saves and restores of a state on an accelerator, beside peers: python benchmarks/gpu_snapshot.py

Four parts, each in new processes; on a CPU they run, but the figures mean nothing.

- *Bus*: GB/s of copies between device and host.
- *Saves*: every way in turn saves the state while training steps run that donate it. How long the call blocks, how much longer
  the next step and the median of the others take than the steps right before the save, and after how long the save is committed.
  A card that has rested is faster for seconds: others go before these, and the next step after a call that blocks is too short. The
  first save of a way is given by itself: it compiles, and jax takes page-locked memory from the system. `torch.save` and DCP with
  page-locked memory save as many bytes in a process of torch.
- *Beside*: how much longer copies and the steps that are enqueued right after them take than these steps alone, until the copies are
  done, or sent to page-locked memory: what of a save delays training. Compare with *nothing*. Steps read their loss; those of the
  last column ask the host how often to loop.
- *Restores*: a new process for each, whose device and compiler are ready, reads the files (in the page cache, or not) until all
  arrays are on the device. The floor `disk` reads the files into memory that was used before.

Saves go to a RAM disk if there is one, because the copy is measured, not the disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shared import MIB, fresh, header, in_turn, middle, options, row, spread, timed

OURS = {
    "ckpt, host": "host",
    "ckpt, device": "device",
    "ckpt, pinned_host": "pinned_host",
}
"""Way -> ``Options(snapshot=)``."""
CONTROL = "nothing"
"""No save: the noise of the columns of steps."""
LIBRARIES = {"orbax": "orbax_v1", "orbax uncompressed": "orbax_v1_uncompressed"}
RESTORES = {
    "ckpt": "ckpt",
    **LIBRARIES,
    "safetensors": "safetensors",
    "torch.load": "torch_save",
}
ROOM = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""Of the device's memory jax may take as much: the largest state stands there three times."""


def make_state(mib: int, leaves: int) -> dict[str, Any]:
    """Float32 leaves of equal size on the first device."""
    import jax

    rows = max(1, mib * MIB // leaves // 4096)
    make = jax.jit(lambda key: jax.random.normal(key, (rows, 1024)))
    keys = jax.random.split(jax.random.key(0), leaves)
    return {f"w{n}": make(key) for n, key in enumerate(keys)}


def size_of(state: dict[str, Any]) -> int:
    return sum(leaf.nbytes for leaf in state.values())


# ---- the bus


def bus(mib: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of each way to copy a state of 16 leaves, in each round."""
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    state = make_state(mib, 16)
    device = jax.devices()[0]
    plain = SingleDeviceSharding(device)
    locked = SingleDeviceSharding(device, memory_kind="pinned_host")
    another = jax.jit(lambda leaves: [leaf + 1 for leaf in leaves])
    found: dict[str, list[float]] = {}

    def measure(name: str, copy: Callable[[], Any]) -> Any:
        secs, copied = timed(lambda: jax.block_until_ready(copy()))
        found.setdefault(name, []).append(size_of(state) / secs / 1e9)
        return copied

    for _ in range(rounds + 1):
        leaves = jax.block_until_ready(another([*state.values()]))
        host = measure(
            "to new memory of the host", lambda leaves=leaves: [*map(np.asarray, leaves)]
        )
        measure("from memory of the host", lambda host=host: jax.device_put(host, plain))
        if device.platform != "cpu":
            there = measure(
                "to page-locked memory", lambda leaves=leaves: jax.device_put(leaves, locked)
            )
            measure("from page-locked memory", lambda there=there: jax.device_put(there, plain))
    return {name: values[1:] for name, values in found.items()}


# ---- saves beside training


class Training:
    """Steps of matrix products which keep the device busy, and which update the whole donated state.

    Args:
        state: what is trained.
        width: of the matrices.
        step_secs: how long a step takes about.
        asks: the device asks the host before each product whether to go on, as XLA's loops of no fixed length do: a copy from
            the device each time, which waits for those that are under way.
    """

    def __init__(
        self, state: dict[str, Any], width: int, step_secs: float, asks: bool = False
    ) -> None:
        import jax
        import jax.numpy as jnp

        self.state = state
        self._x = jax.random.normal(jax.random.key(1), (width, width), jnp.bfloat16)
        self._count = 1

        def step(state: dict[str, Any], x: Any, count: int) -> Any:
            x = jax.lax.fori_loop(0, count, lambda _, x: jnp.tanh(x @ x), x)
            return jax.tree.map(lambda leaf: leaf * 0.999, state), x, jnp.float32(x[0, 0])

        fixed = () if asks else (2,)
        self._step = jax.jit(step, static_argnums=fixed, donate_argnums=(0, 1))
        for _ in range(3):
            self.step()  # which compiles it
            self._count = max(1, round(self._count * step_secs / self.step()))
        self.step()

    def step(self) -> float:
        """Seconds of one step, until what it computed has been read."""

        def work() -> None:
            self.state, self._x, loss = self._step(self.state, self._x, self._count)
            float(loss)

        secs, _ = timed(work)
        return secs


def starter(way: str, folder: Path) -> Callable[[dict[str, Any]], Callable[[], Any]]:
    """A function that starts a save, which gives one that waits for its end."""
    import ckpt_core as ckpt
    from ckpt_core.bench.generators import SaveLoadOptions
    from ckpt_core.bench.libraries import make_library

    if way == CONTROL:
        return lambda state: lambda: None
    if way in OURS:
        chosen = ckpt.Options(snapshot=OURS[way])
        return lambda state: ckpt.save_async(folder, state, options=chosen).result
    library = make_library(SaveLoadOptions(library=LIBRARIES[way]))
    return lambda state: library.start_save(folder, state)


def saves(
    top: str,
    mib: int,
    leaves: int,
    rounds: int,
    steps: int,
    width: int,
    step_secs: float,
    lead_secs: float,
    ways: list[str],
) -> dict[str, Any]:
    """Measures saves of each way in turn."""
    import jax

    training = Training(make_state(mib, leaves), width, step_secs)
    alone: list[float] = []

    def save(way: str) -> dict[str, float]:
        rested = time.perf_counter()  # while the last checkpoint was removed
        while time.perf_counter() - rested < lead_secs:
            training.step()
        before = [training.step() for _ in range(steps)]
        alone.extend(before)
        folder = Path(top) / "saved"
        start = starter(way, folder)
        began = time.perf_counter()
        wait = start(training.state)
        blocked_secs = time.perf_counter() - began
        waiter = threading.Thread(target=wait)
        waiter.start()
        beside = [training.step()]
        while waiter.is_alive():
            beside.append(training.step())
        waiter.join()
        committed_secs = time.perf_counter() - began
        shutil.rmtree(folder, ignore_errors=way == CONTROL)
        return {
            "blocked": blocked_secs,
            "next step": beside[0] - middle(before),
            "later steps": middle(beside[1:] or beside) - middle(before),
            "committed": committed_secs,
        }

    found = in_turn(ways, rounds + 1, save)
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "device": f"{jax.devices()[0].device_kind}, jax {jax.__version__}",
        "bytes": size_of(training.state),
        "alone": alone,
        "ways": found,
        "peak": memory.get("peak_bytes_in_use", 0),
    }


def beside(
    mib: int, leaves: int, rounds: int, steps: int, width: int, step_secs: float, asks: bool
) -> dict[str, list[float]]:
    """Seconds by which steps are longer until it has ended, for each thing that a save does on the device."""
    import jax
    from jax.sharding import SingleDeviceSharding

    training = Training(make_state(mib, leaves), width, step_secs, asks)
    locked = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    copied = jax.jit(lambda leaves: [jax.numpy.copy(leaf) for leaf in leaves])

    def waited_for(arrays: Any) -> threading.Thread:
        return threading.Thread(target=jax.block_until_ready, args=(arrays,))

    def sent(at_a_time: int, late_secs: float = 0.0) -> threading.Thread:
        arrays = copied([*training.state.values()])

        def send() -> None:
            there: list[Any] = []
            time.sleep(late_secs)
            for start in range(0, len(arrays), at_a_time):
                there += jax.device_put(arrays[start : start + at_a_time], locked)
                jax.block_until_ready(there)

        return threading.Thread(target=send)

    ways: dict[str, Callable[[], threading.Thread]] = {
        "nothing": lambda: waited_for([]),
        "copies on the device": lambda: waited_for(copied([*training.state.values()])),
        "copies, which are sent": lambda: sent(leaves),
        "copies, sent 80 ms later": lambda: sent(leaves, 0.08),
        "copies, sent 8 at a time": lambda: sent(8),
        "copies, sent 2 at a time": lambda: sent(2),
        "copies, sent one by one": lambda: sent(1),
        "the state itself, which is sent": lambda: waited_for(
            jax.device_put(training.state, locked)
        ),
    }

    def measure(way: str) -> float:
        alone_secs = middle([training.step() for _ in range(steps)])
        began, count = time.perf_counter(), 1
        under_way = ways[way]()
        under_way.start()
        training.step()
        while under_way.is_alive():
            training.step()
            count += 1
        longer_secs = time.perf_counter() - began - count * alone_secs
        under_way.join()
        return longer_secs

    return {way: found[1:] for way, found in in_turn(ways, rounds + 1, measure).items()}


def torch_saves(top: str, mib: int, leaves: int, rounds: int) -> dict[str, Any]:
    """Measures `torch.save`, and DCP with page-locked memory, of as many bytes; the first round of each warms up."""
    import torch
    from torch import distributed
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    cuda = torch.cuda.is_available()
    count = mib * MIB // leaves // 4
    state = {f"w{n}": torch.randn(count, device="cuda" if cuda else "cpu") for n in range(leaves)}
    address = f"file://{tempfile.mktemp(dir=top)}"
    backends = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    distributed.init_process_group(backends, init_method=address, rank=0, world_size=1)
    stager = BlockingAsyncStager(cache_staged_state_dict=cuda)  # which page-locks what it keeps
    file, folder = Path(top) / "saved.pt", Path(top) / "saved"

    def torch_save() -> dict[str, float]:
        secs, _ = timed(lambda: torch.save(state, file))
        file.unlink()
        return {"blocked": secs, "committed": secs}

    def dcp_save() -> dict[str, float]:
        began = time.perf_counter()
        started: Any = dcp.async_save(state, checkpoint_id=folder, async_stager=stager)
        blocked_secs = time.perf_counter() - began
        started.result()
        committed_secs = time.perf_counter() - began
        shutil.rmtree(folder)
        return {"blocked": blocked_secs, "committed": committed_secs}

    ways = {"torch.save": torch_save, "DCP, page-locked": dcp_save}
    found = in_turn(ways, rounds + 1, lambda way: ways[way]())
    distributed.destroy_process_group()
    return {"ways": found}


# ---- restores


def save_for_restore(folder: str, way: str, mib: int, leaves: int) -> None:
    from ckpt_core.bench.generators import SaveLoadOptions
    from ckpt_core.bench.libraries import make_library

    library = make_library(SaveLoadOptions(library=RESTORES[way]))
    library.save(Path(folder) / way, library.prepare(make_state(mib, leaves)))


def restore(folder: str, way: str, mib: int, leaves: int) -> list[float]:
    """Seconds of imports and of a load to the device; and the peak of device memory as a multiple of the state."""
    path = f"{folder}/{way}"
    if way == "torch.load":
        import torch

        where = "cuda" if torch.cuda.is_available() else "cpu"
        torch.zeros(1, device=where) + 1
        began = time.perf_counter()
        loaded = torch.load(path, map_location=where)
        if where == "cuda":
            torch.cuda.synchronize()
        secs = time.perf_counter() - began
        size_bytes = sum(tensor.nbytes for tensor in loaded.values())
        peak = torch.cuda.max_memory_allocated() if where == "cuda" else 0
        return [0.0, secs, peak / size_bytes]
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(8)))
    rows = max(1, mib * MIB // leaves // 4096)
    one = jax.sharding.SingleDeviceSharding(device)
    like = {
        f"w{n}": jax.ShapeDtypeStruct((rows, 1024), jnp.float32, sharding=one)
        for n in range(leaves)
    }
    began = time.perf_counter()
    load: Callable[[], Any]
    if way == "ckpt":
        import ckpt_core as ckpt

        load = lambda: ckpt.load(path, like)  # noqa: E731
    elif way == "safetensors":
        from safetensors.flax import load_file

        load = lambda: load_file(path)  # noqa: E731
    else:
        from orbax.checkpoint import v1 as ocp

        load = lambda: ocp.load(path, like)  # noqa: E731
    imported = time.perf_counter()
    loaded = load()
    jax.block_until_ready(loaded)
    secs = time.perf_counter() - imported
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return [imported - began, secs, peak / size_of(loaded)]


def restores(
    top: str, mib: int, leaves: int, rounds: int, ways: list[str], cold: bool
) -> Iterator[tuple[str, list[list[float]]]]:
    """Each way, and what was measured of it in each round."""
    from restart import floor, forget, remember

    def measure(way: str) -> list[float]:
        if cold:
            forget(top)
        else:
            remember(Path(top) / ("ckpt" if way == "disk" else way))
        if way == "disk":
            return fresh(floor, time.time(), top, way, leaves, 1)
        return fresh(restore, top, way, mib, leaves, **ROOM)

    yield from in_turn([*ways, "disk"], rounds, measure).items()


def print_saves(mib: int, found: dict[str, Any], of_torch: dict[str, Any]) -> None:
    print(f"\n{mib} MiB")
    if "device" in found:
        alone, peak = spread(found["alone"], ".1f", 1e3), found["peak"] / found["bytes"]
        print(f"{found['device']}: a step takes {alone} ms alone; peak of memory {peak:.2f} states")
    print()
    columns = "blocks", "the first time", "next step", "first time", "later steps", "committed, s"
    header("ms", *columns)
    for way, (first, *others) in {**found["ways"], **of_torch["ways"]}.items():

        def cell(name: str, form: str, factor: float = 1e3, others: Any = others) -> str:
            values = [one[name] for one in others if name in one]
            return spread(values, form, factor) if values else ""

        alone = f"{first['next step'] * 1e3:+.0f}" if "next step" in first else ""
        cells = cell("blocked", ".1f"), f"{first['blocked'] * 1e3:.0f}"
        cells = *cells, cell("next step", "+.1f"), alone, cell("later steps", "+.1f")
        row(way, *cells, cell("committed", ".2f", 1.0))


def main() -> None:
    given = options(
        __doc__,
        mib=([512, 8192], "sizes of the state that is saved"),
        restore_mib=(2048, "size of the state that is restored"),
        leaves=64,
        rounds=5,
        steps=(3, "alone, right before each save or copy"),
        width=(8192, "of the matrices of a step"),
        step_secs=0.5,
        lead_secs=(3.0, "of steps before those that are compared with a save"),
        parts=(
            "bus,saves,beside,torch,warm,cold",
            "which parts, by commas: the last two are restores",
        ),
        ways=(",".join(RESTORES), "what is restored, by commas"),
        savers=([CONTROL, *OURS, *LIBRARIES], "what saves"),
    )
    parts = given.parts.split(",")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else given.directory) as top:
        if "bus" in parts:
            header("copy", "GB/s")
            for way, rates in fresh(bus, given.mib[0], given.rounds).items():
                row(way, spread(rates, ".1f"))
        for mib in given.mib:
            shape = top, mib, given.leaves, given.rounds
            loop = given.steps, given.width, given.step_secs, given.lead_secs, given.savers
            none: dict[str, Any] = {"ways": {}}
            found = fresh(saves, *shape, *loop, **ROOM) if "saves" in parts else none
            of_torch = fresh(torch_saves, *shape) if "torch" in parts else none
            if found["ways"] or of_torch["ways"]:
                print_saves(mib, found, of_torch)
            if "beside" in parts:
                short_secs = given.step_secs / 15
                kinds = (given.step_secs, False), (short_secs, False), (given.step_secs, True)
                columns = [
                    fresh(beside, *shape[1:], *loop[:2], *kind, **ROOM).items() for kind in kinds
                ]
                print(f"\n{mib} MiB: steps are longer by, ms\n")
                names = f"{given.step_secs:g} s", f"{short_secs * 1e3:.0f} ms", "asking the host"
                header("just before a step", *names)
                for cells in zip(*columns, strict=True):
                    row(cells[0][0], *(spread(secs, "+.1f", 1e3) for _, secs in cells))
    turns_of = [cold for cold in (False, True) if ("cold" if cold else "warm") in parts]
    if turns_of:
        ways = given.ways.split(",")
        with tempfile.TemporaryDirectory(dir=given.directory) as top:
            for way in ways:
                fresh(save_for_restore, top, way, given.restore_mib, given.leaves, **ROOM)
            for cold in turns_of:
                print(f"\n{given.restore_mib} MiB, {'not ' * cold}in the page cache\n")
                header("restore, s", "imports", "load", "GB/s", "peak of device memory")
                shape = top, given.restore_mib, given.leaves, given.rounds
                for way, turns in restores(*shape, ways, cold):
                    imports, secs, *peaks = zip(*turns, strict=True)
                    rate = given.restore_mib * MIB / middle(secs) / 1e9
                    peak = f"{max(peaks[0]):.2f}" if way != "disk" else ""
                    row(way, spread(imports), spread(secs), f"{rate:.2f}", peak)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
