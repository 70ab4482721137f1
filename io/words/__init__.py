"""Reads and writes atomic 64-bit words in shared memory, with C code that is compiled on first use."""
