"""Callbacks that take part in the training: precision, clipping, averages, metrics, progress."""
