"""Turns texts into token ids and caches them on disk."""
