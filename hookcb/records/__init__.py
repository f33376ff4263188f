"""Numbers kept by record, step and layer, and how they are printed and drawn."""
