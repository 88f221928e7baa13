"""How results show themselves in a notebook and in an interactive session: short for any number of leaves."""

from html.parser import HTMLParser
from typing import Any

import jax.numpy as jnp
import numpy as np

import ckpt_core as ckpt


class Page(HTMLParser):
    """The text of a page, and whether its tags are closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text, self.open, self.tags = "", list[str](), set[str]()
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_results_show_what_they_hold(tmp_path):
    with ckpt.Checkpointer(tmp_path) as run:
        state = {"w": jnp.ones((2, 3), jnp.bfloat16), "old": np.ones(2), "text": "x"}
        run.save(3, state, metrics={"loss": 0.25}, metadata={"note": "<b>"})
        run.wait_until_finished()
        info = Page(run.inspect(3)._repr_html_())
        assert "[2, 3]" in info.text and "loss 0.25" in info.text and "bfloat16" in info.text
        assert '{"note": "<b>"}' in info.text and "b" in info.tags  # ours; the user's is text
        whole = Page(run._repr_html_())
        assert "1: 3" in whole.text and str(tmp_path) in whole.text
        target = {"w": jnp.zeros((2, 3)), "new": np.zeros(1), "text": ""}
        restored = run.restore_latest(target, missing="keep", unexpected="ignore", cast=True)
        shown = Page(restored._repr_html_())
    for told in ("step 3 of", "2 loaded", "1 missing", "1 saved, not wanted", "1 of another dtype"):
        assert told in shown.text, told
    assert "state/new" in shown.text


def test_names_are_text(tmp_path):
    ckpt.save(tmp_path / "a", {"<script>alert(1)</script>": np.ones(1)})
    page = Page(ckpt.inspect(tmp_path / "a")._repr_html_())
    assert "script" not in page.tags and "<script>" in page.text


def test_thousands_of_leaves_and_steps_stay_short(tmp_path):
    ckpt.save(tmp_path / "a", {f"k{n}": n for n in range(1000)})
    shown = ckpt.inspect(tmp_path / "a")._repr_html_()
    assert "and 800 more" in Page(shown).text and len(shown) < 50_000
    with ckpt.Checkpointer(tmp_path / "run") as run:
        assert "none" in Page(run._repr_html_()).text


def test_files_json_and_orbax(tmp_path):
    (tmp_path / "vocabulary").write_text("a b")
    items = {"v": ckpt.Files(tmp_path / "vocabulary"), "config": ckpt.Json({"a": 1})}
    ckpt.save(tmp_path / "a", items=items)
    page = Page(ckpt.inspect(tmp_path / "a")._repr_html_())
    assert "vocabulary" in page.text and "json" in page.text


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
