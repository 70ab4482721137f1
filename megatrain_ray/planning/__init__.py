"""Turns a configuration into a plan."""
