"""MemoryStats: which layer holds how much memory, and what grows."""
