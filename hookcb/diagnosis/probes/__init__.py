"""Probes that measure a running training for its `Run`."""
