"""Numbers about what checkpoints hold, for people to look at; arrays are read a piece at a time.

A module here reads and computes; ``cli`` prints.
"""
