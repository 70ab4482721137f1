"""Prepares the data of a run and serves its batches."""
