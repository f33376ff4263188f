"""Measurements: parts that several faults read, each made once."""
