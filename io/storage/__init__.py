"""Stores blobs in memory, in files (by O_DIRECT or kvikio) or in object stores, and measures transfers."""
