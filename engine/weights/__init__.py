"""Provides the values that weights begin with, are restored to, and are exported as."""
