"""Accumulates gradients, measures their norm and offloads them to the host."""
