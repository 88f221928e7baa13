"""What is on disk: old checkpoints stay readable, all writers write the same."""
