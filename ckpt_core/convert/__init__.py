"""Weights in and out: what a checkpoint holds in the formats of other programs, and the way back.

ckpt export runs/1/100 weights --to safetensors
ckpt import model.npz weights
"""

from ckpt_core.convert._incoming import import_weights as import_weights
from ckpt_core.convert._outgoing import (
    export_npz as export_npz,
    export_safetensors as export_safetensors,
)
from ckpt_core.convert._torch import export_torch as export_torch
