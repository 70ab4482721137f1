"""Exports a save as a model folder of Hugging Face."""
