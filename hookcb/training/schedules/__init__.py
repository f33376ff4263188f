"""Schedules of the learning rate over a fit."""
