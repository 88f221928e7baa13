"""Orbax reads what ckpt wrote, and ckpt what Orbax wrote."""
