"""Tiers: the places where copies of a save lie.

Each process keeps the newest steps in a directory of its own (``LocalTier``); a background thread writes steps to the
persistent directory. Only steps that are complete across all processes are restored, from either tier, and of one number
the newest save counts in both.
"""

from ckpt_core._run.tiers.judge import Misfit
from ckpt_core._run.tiers.local import LocalTier, open_local
