"""StepTimer: how long a step takes, and which part of it."""
