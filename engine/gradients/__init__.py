"""Adds gradients up, measures their norm and offloads them to the host."""
