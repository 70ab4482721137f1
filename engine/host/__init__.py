"""Holds the host's side of a step: its interfaces, the gradient slab and the words that signal."""
