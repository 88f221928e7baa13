"""Orbax's first API on ckpt's engine; its names are those of ``ckpt_orbax`` itself."""
