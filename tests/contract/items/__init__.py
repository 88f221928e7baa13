"""Items that are no pytrees."""
