"""Measures the speed of a configuration and what it could reach at most."""
