"""`ckpt bench`, and the scripts in benchmarks/."""
