"""NaN and infinity: finding their origin, and ending the training."""
