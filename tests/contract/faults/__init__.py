"""Tools that make a saving process fail at a chosen file operation; see `harness`."""
