"""Numbers that are not finite or not held."""
