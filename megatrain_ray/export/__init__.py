"""Exports a save as a model folder of Hugging Face, and configures runs that only evaluate one."""
