"""`Distributed`: one training on several processes."""
