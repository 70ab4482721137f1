"""Writes a save in checksummed parts, commits it with its manifest, and reads it back."""
