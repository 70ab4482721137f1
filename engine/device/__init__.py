"""Wraps a device: its streams, events and memory, its rank among several, its rates and its NUMA node."""
