"""ActivationStats: statistics of what each layer puts out."""
