"""What several faults read, measured once."""
