"""GradientHealth: statistics of gradients and of what each step changes."""
