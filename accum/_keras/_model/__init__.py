"""The model that accumulates: its class, options and what it knows."""
