"""What was seen, for people: in a terminal, on a page, as pictures."""
