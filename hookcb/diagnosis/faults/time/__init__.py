"""Time and memory that are spent in vain."""
