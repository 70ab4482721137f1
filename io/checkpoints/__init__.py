"""Reads and writes model folders of Hugging Face, files of the hub, and adapters of the peft library."""
