"""Several real processes of jax.distributed."""
