"""The command `hookcb` with its subcommands demo, diagnose and explain."""
