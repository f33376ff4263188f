"""MemoryStats: memory of each layer, and its growth."""
