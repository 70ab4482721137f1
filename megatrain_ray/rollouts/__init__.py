"""Samples answers to prompts, rewards them by functions in a process of their own, and keeps them."""
