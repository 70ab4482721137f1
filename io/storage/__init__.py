"""Stores blobs in memory or in files (by O_DIRECT or kvikio), optionally compressed, and measures transfers."""
