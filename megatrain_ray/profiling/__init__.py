"""Measures and caches how fast this machine's GPU, links and disks are."""
