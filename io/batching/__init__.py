"""Cuts tokens into windows, orders and mixes these, and puts them together as batches."""
