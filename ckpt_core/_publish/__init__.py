"""Weights on their way from a trainer to samplers, as checkpoints and what changed between them."""

from ckpt_core._publish.follower import Follower as Follower
from ckpt_core._publish.publisher import Publisher as Publisher
