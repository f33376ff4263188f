"""Faults of optimizers and their steps."""
