"""Offloads activations to host memory or disk and reloads them before their backward."""
