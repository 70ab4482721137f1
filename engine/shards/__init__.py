"""Runs the optimizer shards: their state, their update loop, and saves that are written while training goes on."""
