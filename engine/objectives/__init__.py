"""Defines objectives over the log-probabilities of whole answers."""
