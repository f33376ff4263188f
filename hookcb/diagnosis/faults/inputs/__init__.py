"""Faults of the inputs."""
