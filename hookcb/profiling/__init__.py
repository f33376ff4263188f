"""ProfilerCallback: time and memory by phase, layer and operator."""
