"""Implements what the processes of a run do, as plain classes without Ray."""
