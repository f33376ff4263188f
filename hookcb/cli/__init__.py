"""The command `hookcb`: demo, demo --fault, diagnose."""
