"""Faults of gradients."""
