"""Measures what the engine reaches on this machine, as rates for plans and as benchmarks."""
