"""ActivationStats: statistics of each layer's output."""
