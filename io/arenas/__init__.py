"""Shares host memory between processes and keeps the descriptors of it open."""
