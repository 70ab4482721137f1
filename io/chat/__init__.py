"""Turns conversations into token ids with loss weights."""
