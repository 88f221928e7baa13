"""The pytest plugin; must import nothing that imports jax."""
