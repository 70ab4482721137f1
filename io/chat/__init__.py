"""Turns conversations into token ids with a loss mask."""
