"""What lies beside checkpoints in a directory: names, locks, links."""
