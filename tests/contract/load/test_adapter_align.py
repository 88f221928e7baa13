"""The core's hook for adapters that know which saved name is which of an object's."""

import numpy as np
import pytest

import ckpt_core as ckpt


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
def adapter():
    made = Adapter()
    ckpt.register(made)
    return made


def test_renamed_leaves_are_found(tmp_path, adapter):
    ckpt.save(tmp_path / "a", model=Numbered(1, 5.0))
    target = Numbered(7, 0.0)
    report = ckpt.restore(tmp_path / "a", model=target).report
    assert target.state["layer_7"]["w"].tolist() == [5.0, 5.0]
    assert report.loaded == ("model/layer_1/w",)
    (saved, ordered), *_ = adapter.asked
    assert saved["layer_1/w"].shape == (2,) and saved["layer_1/w"].dtype == "float64"
    assert ordered is True


@pytest.mark.parametrize(("saved", "wanted"), [("counter_a", None), (None, "counter_b")])
def test_what_is_left_alone_is_neither_missing_nor_unexpected(tmp_path, adapter, saved, wanted):
    ckpt.save(tmp_path / "a", model=Numbered(1, 5.0, saved))
    target = Numbered(7, 0.0, wanted)
    report = ckpt.restore(tmp_path / "a", model=target).report
    assert target.state["layer_7"]["w"].tolist() == [5.0, 5.0]
    assert report.missing == report.unexpected == ()


def test_what_is_not_left_alone_still_is(tmp_path, adapter):
    ckpt.save(tmp_path / "a", model=Numbered(1, 5.0, "other"))
    with pytest.raises(ckpt.StructureMismatch, match="other"):
        ckpt.restore(tmp_path / "a", model=Numbered(7, 0.0))


def test_the_users_rename_comes_first(tmp_path, adapter):
    ckpt.save(tmp_path / "a", model=Numbered("x", 5.0))
    target = Numbered(7, 0.0)
    ckpt.restore(tmp_path / "a", model=target, rename={"layer_x": "layer_y"})
    assert target.state["layer_7"]["w"].tolist() == [5.0, 5.0]
    assert "layer_y/w" in adapter.asked[-1][0]


def test_only_still_selects(tmp_path, adapter):
    ckpt.save(tmp_path / "a", model=Numbered(1, 5.0, "other"))
    target = Numbered(7, 0.0, "counter_b")
    ckpt.restore(tmp_path / "a", model=target, only="layer_*/**")
    assert target.state["layer_7"]["w"].tolist() == [5.0, 5.0]
