"""Generates text with an exported model, by Transformers."""
