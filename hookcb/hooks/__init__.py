"""Hooks on modules and tensors, what they cover, and the callback to build your own on."""
