"""Faults of the targets."""
