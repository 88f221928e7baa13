"""One training run: a directory of steps, which writer may commit to it, retention, and restore."""
