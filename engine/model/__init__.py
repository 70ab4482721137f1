"""Describes what a model is: its structure, attention, adapters, experts and loss."""
