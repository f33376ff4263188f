"""Checkpoint: the whole state of a fit in a file, and going on from it."""
