"""Reads the images of chats, and lets a model's own processor say by what text each is replaced."""
