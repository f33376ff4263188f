"""What is looked at in a running training to fill an Evidence."""
