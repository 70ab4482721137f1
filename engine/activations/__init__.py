"""Offloads activations to host or disk and brings them back before their backward."""
