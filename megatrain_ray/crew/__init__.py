"""Starts, places, watches and replaces the processes of a run by Ray."""
