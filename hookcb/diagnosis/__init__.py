"""Turns recorded numbers into a verdict: what is wrong, in which layer, why, and what to do next."""
