"""Drives a run: its loop, its policy, its saves and evaluations."""
