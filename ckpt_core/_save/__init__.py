"""Saving: flatten, plan, snapshot, write, commit."""

from ckpt_core._save.job import NOTHING, RecordFields, SaveJob, collect_items, metrics_of
from ckpt_core._save.prepare import take_snapshot
from ckpt_core._save.protocol import Save, save, save_async
from ckpt_core._save.unchanged import Links
