"""Faults of the model: its layers, modes, masks and parameters."""
