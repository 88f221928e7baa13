"""What an adapter may ask of the core: targets that depend on what was saved, arrays that are copied, names that are aligned."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt


class Slots:
    """An object that has no state before it is used, as optimizers have none."""

    __module__ = "imagined_framework.slots"

    def __init__(self, **slots: Any) -> None:
        self.slots = slots


class SlotsAdapter:
    arrays_are_writable = True

    def accepts(self, cls: type, /) -> bool:
        return issubclass(cls, Slots)

    def get_state(self, obj: Slots, /) -> Any:
        return dict(obj.slots)

    def set_state(self, obj: Slots, state: Any, /) -> None:
        obj.slots = state

    def wanted(self, obj: Slots, saved: Any, /) -> Any:
        self.seen = saved
        return {name: obj.slots.get(name, leaf) for name, leaf in saved.items()}


@pytest.fixture
def adapter() -> SlotsAdapter:
    made = SlotsAdapter()
    ckpt.register(made)
    return made


LEAVES = {
    "jax": jnp.arange(3.0),
    "numpy": np.arange(4, dtype=np.int16),
    "scalar": np.float32(2.5),
    "int": 3,
    "big": 2**80,
    "float": 0.5,
    "bool": True,
    "complex": 1j,
    "text": "t",
    "bytes": b"abc",
    "generator": np.random.default_rng(3),
    "key": jax.random.key(1),
}


def test_a_target_asks_for_what_was_saved(adapter, tmp_path):
    ckpt.save(tmp_path / "a", slots=Slots(**LEAVES))
    fresh = Slots()
    ckpt.restore(tmp_path / "a", slots=fresh)
    assert list(fresh.slots) == list(LEAVES)
    for name in LEAVES.keys() - {"generator", "key"}:
        np.testing.assert_array_equal(fresh.slots[name], LEAVES[name])
        assert type(fresh.slots[name]) is type(LEAVES[name]), name
    leaf = adapter.seen["numpy"]
    assert (leaf.kind, leaf.shape, leaf.dtype) == ("numpy", (4,), "int16")


def test_what_it_wants_is_checked_like_any_other_target(adapter, tmp_path):
    ckpt.save(tmp_path / "a", slots=Slots(w=jnp.ones(3), b=jnp.ones(2)))
    target = Slots(w=jnp.zeros(4))
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", slots=target)
    assert [(m.path, m.kind) for m in caught.value.mismatches] == [("w", "shape")]
    assert list(target.slots) == ["w"]


@pytest.mark.parametrize("arguments", [{"only": "w"}, {"missing": "keep", "rename": {"b": "c"}}])
def test_what_it_has_no_value_for_is_never_made_up(adapter, tmp_path, arguments):
    ckpt.save(tmp_path / "a", slots=Slots(w=jnp.ones(3), b=jnp.ones(2)))
    target = Slots(w=jnp.zeros(3))
    with pytest.raises(ckpt.StructureMismatch, match="slots: b: "):
        ckpt.restore(tmp_path / "a", slots=target, **arguments)
    assert target.slots["w"].sum() == 0


@pytest.mark.parametrize("where", ["host", "device"])
def test_writable_arrays_are_copied_by_asynchronous_saves(adapter, tmp_path, where):
    """On a CPU an array may lie in memory that the framework's user can write to."""
    memory = np.frombuffer(bytearray(16 * 1024 * 1024 + 64), np.float32)
    memory = memory[(-memory.ctypes.data % 64) // 4 :][: 4 * 1024 * 1024]
    memory[:] = 1
    array = jax.device_put(memory)
    assert array.unsafe_buffer_pointer() == memory.ctypes.data, "this test needs an alias"
    busy = jax.jit(lambda x: x @ x @ x)(jnp.ones((1000, 1000)))  # what is enqueued now runs later
    options = ckpt.Options(snapshot=where)
    pending = ckpt.save_async(tmp_path / "a", slots=Slots(w=array), options=options)
    memory[:] = 2
    busy.block_until_ready()
    pending.result()
    assert float(ckpt.load(tmp_path / "a")["slots"]["w"].max()) == 1.0


def test_attributes_of_an_ordered_dict_stay(tmp_path):
    """torch keeps the versions of modules in an attribute of its state_dict."""
    tree: Any = collections.OrderedDict(w=jnp.ones(2))
    tree._metadata = {"": {"version": 1}}
    ckpt.save(tmp_path / "a", tree)
    assert ckpt.load(tmp_path / "a", tree)._metadata == {"": {"version": 1}}


class Numbered:
    """An object whose names depend on when it was made."""

    def __init__(self, number, value, extra=None):
        self.state = {f"layer_{number}": {"w": np.full(2, value)}}
        if extra is not None:
            self.state[extra] = np.zeros(3)


class Adapter:
    def __init__(self):
        self.asked = []

    def accepts(self, cls):
        return cls is Numbered

    def get_state(self, obj):
        return obj.state

    def set_state(self, obj, state):
        obj.state = state

    def align(self, obj, saved, *, ordered):
        self.asked.append((dict(saved), ordered))
        (now,) = (name for name in obj.state if name.startswith("layer"))
        names = {path: f"{now}/w" for path in saved if path.startswith("layer")}
        return names, {path for path in (*saved, *obj.state) if "counter" in path}


@pytest.fixture
def aligner():
    made = Adapter()
    ckpt.register(made)
    return made


def test_renamed_leaves_are_found(tmp_path, aligner):
    ckpt.save(tmp_path / "a", model=Numbered(1, 5.0))
    target = Numbered(7, 0.0)
    report = ckpt.restore(tmp_path / "a", model=target).report
    assert target.state["layer_7"]["w"].tolist() == [5.0, 5.0]
    assert report.loaded == ("model/layer_1/w",)
    (saved, ordered), *_ = aligner.asked
    assert saved["layer_1/w"].shape == (2,) and saved["layer_1/w"].dtype == "float64"
    assert ordered is True


@pytest.mark.parametrize(("saved", "wanted"), [("counter_a", None), (None, "counter_b")])
def test_what_is_left_alone_is_neither_missing_nor_unexpected(tmp_path, aligner, saved, wanted):
    ckpt.save(tmp_path / "a", model=Numbered(1, 5.0, saved))
    target = Numbered(7, 0.0, wanted)
    report = ckpt.restore(tmp_path / "a", model=target).report
    assert target.state["layer_7"]["w"].tolist() == [5.0, 5.0]
    assert report.missing == report.unexpected == ()


def test_what_is_not_left_alone_still_is(tmp_path, aligner):
    ckpt.save(tmp_path / "a", model=Numbered(1, 5.0, "other"))
    with pytest.raises(ckpt.StructureMismatch, match="other"):
        ckpt.restore(tmp_path / "a", model=Numbered(7, 0.0))


def test_the_users_rename_comes_first(tmp_path, aligner):
    ckpt.save(tmp_path / "a", model=Numbered("x", 5.0))
    target = Numbered(7, 0.0)
    ckpt.restore(tmp_path / "a", model=target, rename={"layer_x": "layer_y"})
    assert target.state["layer_7"]["w"].tolist() == [5.0, 5.0]
    assert "layer_y/w" in aligner.asked[-1][0]


def test_only_still_selects(tmp_path, aligner):
    ckpt.save(tmp_path / "a", model=Numbered(1, 5.0, "other"))
    target = Numbered(7, 0.0, "counter_b")
    ckpt.restore(tmp_path / "a", model=target, only="layer_*/**")
    assert target.state["layer_7"]["w"].tolist() == [5.0, 5.0]
