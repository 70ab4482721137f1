"""Keeps the run directory: its files, lock, history, processes and mirror."""
