"""Stores blobs: in memory, in files by O_DIRECT or kvikio, compressed, and with what was moved counted."""
