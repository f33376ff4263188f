"""Learning rates and other settings of the optimizer over a fit."""
