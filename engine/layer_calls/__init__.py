"""Runs a model's own forward layer by layer, and the backward of each call."""
