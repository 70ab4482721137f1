"""Reads and writes atomic 64-bit words in shared memory, by C that is compiled on first use."""
