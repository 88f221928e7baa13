"""Without the private functions of jax by which arrays are placed quickly."""

import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config
from jax._src.interpreters import pxla

import ckpt_core as ckpt
from ckpt_core._devices import placing


def no_scope(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(config, "explicit_device_put_scope")
    patch.delattr(config, "explicit_device_get_scope")


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "it is not there": lambda patch: patch.delattr(pxla, "batched_device_put"),
    "no scope": no_scope,
    "another signature": lambda patch: patch.setattr(pxla, "batched_device_put", lambda *, x: x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_jax_without_the_quick_way_is_slower_and_says_so_once(
    tmp_path, monkeypatch, caplog, change
):
    rows = jax.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x"))
    tree = {
        "one": jnp.arange(12.0),
        "sharded": jax.device_put(jnp.arange(32.0).reshape(8, 4), rows),
        "weak": jnp.asarray(1.5),
    }
    ckpt.save(tmp_path / "a", tree)
    for name in ("_private", "_warn"):
        unwrapped = getattr(placing, name).__wrapped__
        monkeypatch.setattr(placing, name, functools.cache(unwrapped))
    with caplog.at_level(logging.WARNING, "ckpt_core"):
        with monkeypatch.context() as patch:  # jax itself needs it for what comes after
            CHANGES[change](patch)
            placing._private()
        with jax.transfer_guard("disallow"):
            found = [ckpt.load(tmp_path / "a"), ckpt.restore(tmp_path / "a", state=tree)["state"]]
    for got in found:
        for name, want in tree.items():
            assert (got[name].sharding, got[name].weak_type) == (want.sharding, want.weak_type)
            np.testing.assert_array_equal(got[name], want)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "slower" in told[0] and jax.__version__ in told[0]
