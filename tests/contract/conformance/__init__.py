"""`ckpt_core.testing`: the suite for adapters, exact resume, strategies."""
