"""Adapters for hookcb callbacks in other libraries' trainers; importing hookcb imports none of them."""
