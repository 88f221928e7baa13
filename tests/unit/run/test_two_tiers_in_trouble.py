"""Saves of two tiers that are interrupted or fail: nothing wrong is committed, no sound step is left, nothing waits or stays."""

import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._save import prepare
from tests.support import seams

EVERY_THIRD = ckpt.Options(persist_policy=ckpt.when.every_steps(3), local_max_to_keep=9)


def steps_in(tmp_path: Path) -> list[str]:
    return sorted(
        str(file.parent.relative_to(tmp_path)) for file in tmp_path.glob("run/**/ckpt.json")
    )


@contextmanager
def raised_by_a_signal_once(entered: threading.Event) -> Iterator[None]:
    """A handler raises in the main thread, soon after the event is set."""

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        assert entered.wait(30)
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sender.join(30)
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("of", ["numpy", "jax"])
def test_an_interrupted_synchronous_save_has_the_values_of_its_call(tmp_path, monkeypatch, of):
    """Its threads go on, so they must not read the memory to which the caller writes from then on."""
    gate = seams.Gate()
    seams.at(monkeypatch, "write", before=gate)
    values = np.zeros(1 << 18)
    state: Any = values if of == "numpy" else jnp.asarray(values)
    with ckpt.Checkpointer(
        tmp_path / "run", local_directory=tmp_path / "fast", asynchronous=False
    ) as checkpointer:
        with raised_by_a_signal_once(gate.entered):
            checkpointer.save(1, {"w": state})
        values[:] = 7
        if of == "jax":
            state.delete()
        gate.go.set()
    found = [file.parent for file in tmp_path.glob("**/1/ckpt.json")]
    assert len(found) == 2
    for path in found:
        loaded: Any = ckpt.load(path)
        assert (np.asarray(loaded["w"]) == 0).all(), path


def test_a_step_whose_local_save_has_failed_is_continued_from_all_the_same(tmp_path, monkeypatch):
    """Its persistent save ends later and well: the next step continues from it, and does not leave it behind."""
    gate = seams.Gate()
    with ckpt.Checkpointer(
        tmp_path / "run", local_directory=tmp_path / "fast", options=EVERY_THIRD
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": np.zeros(3) + step})
            checkpointer.wait_until_finished()
        with monkeypatch.context() as patch:
            seams.at(patch, "write", before=seams.fail(), where=seams.below(tmp_path / "fast"))
            seams.at(patch, "write", before=gate, where=seams.below(tmp_path / "run"))
            checkpointer.save(3, {"w": np.zeros(3) + 3})
            assert gate.entered.wait(30)
        with pytest.raises(OSError, match="No space left"):
            checkpointer.save(4, {"w": np.zeros(3) + 4})
        saving = threading.Thread(target=checkpointer.save, args=(4, {"w": np.zeros(3) + 4}))
        saving.start()
        saving.join(0.3)  # it waits for what it continues from
        assert saving.is_alive()
        gate.go.set()
        saving.join(30)
        for step in (5, 6):
            checkpointer.save(step, {"w": np.zeros(3) + step})
    assert steps_in(tmp_path) == ["run/3", "run/6"]


@pytest.mark.parametrize(
    ("snapshot", "where"),
    [("host", "both"), ("host", "run"), ("device", "fast"), ("device", "landing")],
)
def test_a_failed_save_holds_none_of_its_arrays(tmp_path, monkeypatch, snapshot, where):
    """Without a garbage collector that looks for circles."""
    if where == "landing":

        def lost(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on the device")

        monkeypatch.setattr(prepare, "_bring_to_host", lost)
    else:
        place = tmp_path if where == "both" else tmp_path / where
        seams.at(monkeypatch, "write", after=seams.fail(), where=seams.below(place))
    options = ckpt.Options(snapshot=snapshot, max_host_bytes=1024)
    with ckpt.Checkpointer(
        tmp_path / "run", local_directory=tmp_path / "fast", options=options
    ) as checkpointer:
        gc.collect()
        gc.disable()
        try:
            held: list[weakref.ref[Any]] = []
            before = sum(array.nbytes for array in jax.live_arrays())
            for step in range(2):
                one, other = jnp.arange(1000.0) + step, np.zeros(1000)
                held += [weakref.ref(one), weakref.ref(other)]
                checkpointer.save(step, {"one": one, "other": other})
                with pytest.raises(OSError, match="No space left"):
                    checkpointer.wait_until_finished()
                del one, other
            assert not any(ref() is not None for ref in held)
            assert sum(array.nbytes for array in jax.live_arrays()) == before
        finally:
            gc.enable()
