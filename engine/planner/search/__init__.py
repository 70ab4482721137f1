"""Chooses the fastest plan that fits."""
