"""Writes the metrics of a run to its sinks."""
