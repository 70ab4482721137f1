"""Keeps the run directory: its files, lock, history and processes."""
