"""Counts the bytes of a plan on the device, on the host and on disk, and chooses what spills to disk."""
