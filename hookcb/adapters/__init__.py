"""Callbacks of hookcb in the trainers of others, one module each; importing hookcb imports none of them."""
