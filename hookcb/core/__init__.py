"""What every room needs: events, Callback, Loop, batches, files, random state, printing of text."""
