"""Keras 3 on JAX for ckpt."""

from ckpt_keras._adapter import ADAPTER as ADAPTER
