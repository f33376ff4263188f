"""Loops that emit the events: the Learner's own, and loops that hookcb only watches."""
