"""Turns sampled answers and their rewards into token ids with advantages."""
