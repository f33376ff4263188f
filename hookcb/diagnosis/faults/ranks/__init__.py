"""Faults of several ranks."""
