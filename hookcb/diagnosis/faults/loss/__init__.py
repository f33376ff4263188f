"""Faults of the loss and its course."""
