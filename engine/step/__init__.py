"""Runs one step: the compute thread, the event loop, and the engine that joins them."""
