"""Finds a model's structure and the bytes of its activations by a traced forward."""
