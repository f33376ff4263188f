"""StepTimer: duration of each step, by phase."""
