"""Holds the host's side of a step: its interfaces, the gradient slab and the shared signal words."""
