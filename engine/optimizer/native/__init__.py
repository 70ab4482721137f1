"""Holds the C source of the update kernel and the Python that compiles and calls it."""
