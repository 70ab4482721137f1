"""Looks up what this machine has: memory, NUMA nodes, processes, versions."""
