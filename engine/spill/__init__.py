"""Moves optimizer state, gradients and weights between disk and host through staging buffers."""
