"""Leaves, containers, keys, classes: what comes back of a tree, and what is refused."""
