"""Compares what a run did with what its plan predicted, and writes traces."""
