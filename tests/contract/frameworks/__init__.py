"""Flax NNX, Optax, Keras, Grain, torch and torchax, Equinox."""
