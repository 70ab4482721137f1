"""Translates configurations of other tools."""
