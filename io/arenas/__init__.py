"""Shares host memory between processes and keeps its file descriptors open."""
