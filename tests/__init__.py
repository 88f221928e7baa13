"""The tests of ckpt; CONTRIBUTING.md says which folder holds what."""
