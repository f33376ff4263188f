"""Base of all other packages: events, Callback, Loop, batches, files, random state, printing of text."""
