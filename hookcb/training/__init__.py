"""Callbacks that take part in training: precision, clipping, averages, metrics, progress."""
