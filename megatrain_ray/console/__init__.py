"""Prints what a person reads while a run goes on, and handles Ctrl-C."""
