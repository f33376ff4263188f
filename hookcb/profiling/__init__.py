"""ProfilerCallback: where the time goes, by layer."""
