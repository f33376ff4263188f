"""The command `hookcb`; what a command needs is imported when it runs, as torch takes seconds."""

INTERRUPTED = 130  # exit code of a program that Ctrl-C has ended
