"""NaN and Inf: where one began, and ending the training at once."""
