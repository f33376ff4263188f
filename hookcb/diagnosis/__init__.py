"""From recorded numbers to a verdict: what is wrong, in which layer, why, and what to do next."""
