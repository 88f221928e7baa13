"""The pytest plugin, loaded wherever ckpt is installed; it must not import jax before it is used."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def assert_exact_resume(tmp_path: Path) -> Callable[..., Any]:
    """``ckpt_core.testing.assert_exact_resume``, which runs in pytest's temporary directory.

    Example::

        def test_resume(assert_exact_resume):
            assert_exact_resume(train, interrupt_at=5)
    """
    from ckpt_core import testing  # jax, only for tests that ask for it

    numbers = itertools.count()

    def check(train: Callable[..., Any], **options: Any) -> Any:
        options.setdefault("directory", tmp_path / f"exact_resume_{next(numbers)}")
        return testing.assert_exact_resume(train, **options)

    return check
