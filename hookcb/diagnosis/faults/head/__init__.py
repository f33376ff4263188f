"""Faults of what the loss gets."""
