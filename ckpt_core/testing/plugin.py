"""The pytest plugin. Pytest loads it wherever ckpt is installed, so it imports jax only on use."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def assert_exact_resume(tmp_path: Path) -> Callable[..., Any]:
    """``ckpt_core.testing.assert_exact_resume``, run in pytest's temporary directory.

    Example::

        def test_resume(assert_exact_resume):
            assert_exact_resume(train, interrupt_at=5)
    """
    from ckpt_core import testing  # imports jax, so only in tests that use the fixture

    numbers = itertools.count()

    def check(train: Callable[..., Any], **options: Any) -> Any:
        options.setdefault("directory", tmp_path / f"exact_resume_{next(numbers)}")
        return testing.assert_exact_resume(train, **options)

    return check
