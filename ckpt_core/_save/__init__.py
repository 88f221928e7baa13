"""Saving: flatten, plan, snapshot, write, commit."""

from ckpt_core._save.job import NOTHING as NOTHING
from ckpt_core._save.job import RecordFields as RecordFields
from ckpt_core._save.job import SaveJob as SaveJob
from ckpt_core._save.job import collect_items as collect_items
from ckpt_core._save.job import make_job as make_job
from ckpt_core._save.job import metrics_of as metrics_of
from ckpt_core._save.prepare import take_snapshot as take_snapshot
from ckpt_core._save.protocol import Save as Save
from ckpt_core._save.protocol import save as save
from ckpt_core._save.protocol import save_async as save_async
from ckpt_core._save.unchanged import Links as Links
