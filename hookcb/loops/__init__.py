"""What emits the events: a Learner's own loop, and other people's loops that are watched."""
