"""Turns prompts into token ids, and sampled answers with their rewards into token ids with advantages."""
