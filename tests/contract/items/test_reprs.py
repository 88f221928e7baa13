"""What an interactive session echoes: short for any number of leaves."""

import numpy as np

import ckpt_core as ckpt


def test_options_show_what_was_set():
    assert repr(ckpt.Options()) == "Options()"
    assert repr(ckpt.Options(durable=False, compression="zstd")) == (
        "Options(durable=False, compression='zstd')"
    )
    assert eval(repr(ckpt.Options(timeout_secs=5.0)), {"Options": ckpt.Options}).timeout_secs == 5


def test_hundreds_of_leaves_fit_a_screen(tmp_path):
    state = {f"layer_{n}": np.ones(2) for n in range(300)}
    ckpt.save(tmp_path / "one", state)
    for shown in (
        repr(ckpt.restore(tmp_path / "one", state).report),
        repr(ckpt.inspect(tmp_path / "one").items["state"]),
    ):
        assert len(shown) < 600 and "300 in all" in shown
    assert "('state/layer_0', 'state/layer_1', 'state/layer_10'" in repr(
        ckpt.RestoreReport(loaded=tuple(sorted(f"state/{name}" for name in state)))
    )
    assert repr(ckpt.RestoreReport(loaded=("a", "b"))).startswith(
        "RestoreReport(loaded=('a', 'b'), "
    )
