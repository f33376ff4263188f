"""Checkpoint: saves the whole state of a fit to a file, and resumes from it."""
