"""Numbers by record, step and layer; tables and figures of them."""
