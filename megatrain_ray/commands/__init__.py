"""Implements further commands of the command line."""
