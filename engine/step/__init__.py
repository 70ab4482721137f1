"""Runs one step. Holds the engine, which joins the compute thread and the event loop."""
