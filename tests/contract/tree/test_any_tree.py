"""Any tree at all comes back: made by Hypothesis."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.trees import QUICK, Moments, Plain, arrays, assert_same, fields_of

LEAF = st.one_of(
    arrays(),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.complex_numbers(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.none(),
    st.floats(width=32).map(np.float32),
    st.integers(0, 2**32 - 1).map(jax.random.key),
)


KEYS = st.one_of(st.text(st.characters(codec="utf-8"), max_size=6), st.integers(-9, 99))


TREE = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.builds(Moments, inner, inner),
        st.builds(Plain, inner, inner),
    ),
    max_leaves=12,
)


def leaves_with_names(tree, path=()):
    """(array name, whether it is text) of every leaf, by the rule of Orbax's format."""
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, Plain):
        children = fields_of(tree).items()
    elif isinstance(tree, Moments):
        children = tree._asdict().items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    elif tree is None:
        return
    else:
        text = isinstance(tree, str) or (type(tree) is int and not -(2**63) <= tree < 2**63)
        yield ".".join(map(str, path)), text
        return
    for key, value in children:
        yield from leaves_with_names(value, (*path, key))


def collides(tree):
    names = [*leaves_with_names(tree)]
    if len({name for name, _ in names}) < len(names):
        return True
    # texts nest by "/", and one cannot be inside another
    texts = [_pointer(name) for name, text in names if text]
    return any(a == b[: len(a)] for i, a in enumerate(texts) for j, b in enumerate(texts) if i != j)


def _pointer(name):
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in name.split("/"))


def check_any_tree(directory, tree):
    path = directory / "c"
    if collides(tree):
        with pytest.raises(ckpt.UnsupportedLeaf):
            ckpt.save(path, tree, options=QUICK)
        assert not path.exists()
        return
    ckpt.save(path, tree, options=QUICK, overwrite=True)
    assert_same(ckpt.load(path), tree)
    assert_same(ckpt.load(path, tree), tree)


@hypothesis.given(TREE)
@hypothesis.settings(max_examples=60)
def test_any_tree(tmp_path_factory, tree):
    check_any_tree(tmp_path_factory.mktemp("tree"), tree)


@pytest.mark.slow
@hypothesis.given(TREE)
@hypothesis.settings(max_examples=1500)
def test_any_tree_at_length(tmp_path_factory, tree):
    check_any_tree(tmp_path_factory.mktemp("tree"), tree)
