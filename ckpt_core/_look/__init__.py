"""Numbers about what checkpoints hold, for people to look at: a module here reads and computes, ``cli`` prints."""
