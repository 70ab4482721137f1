"""Writes files atomically and folders that are complete or absent, and says what is wrong with a disk."""
