"""Runs the optimizer shards: their state, their update loop, and saves while they train."""
