"""Where an epoch of other batches is entered."""

from __future__ import annotations

import pytest

pytest.importorskip("tests.support.keras_models")  # chooses the backend
from ckpt_keras._progress import Batches, Progress, entered_at


@pytest.mark.parametrize(
    ("saved", "now", "together", "done", "warns"),
    [
        ((3, 8, 4), Batches(8, 4), 1, 3, False),
        ((3, 8, 4), Batches(16, 2), 1, 1, True),
        ((3, 8, 4), Batches(4, 8), 1, 6, True),
        ((3, None, 4), Batches(None, 2), 1, 1, True),
        ((3, None, 4), Batches(None, 8), 1, 6, True),
        ((3, None, None), Batches(None, 2), 1, 2, True),  # a checkpoint that has no sizes
        ((3, None, None), Batches(8, 4), 1, 3, False),
        ((3, 8, None), Batches(8, None), 1, 3, False),
        ((3, 8, None), Batches(16, None), 1, 1, True),
        ((4, 8, 8), Batches(8, 8), 4, 4, False),
        ((6, 8, 8), Batches(8, 8), 4, 4, True),
        ((1, 8, 4), Batches(8, 9), 1, 2, True),  # the data grew
    ],
)
def test_where_to_enter(saved, now, together, done, warns):
    batch, size, count = saved
    progress = Progress(batch=batch, batch_size=size, batches_per_epoch=count)
    found, text = entered_at(progress, now, together)
    assert found == done and (text is not None) == warns
    assert found % together == 0 and (now.count is None or found <= now.count)
