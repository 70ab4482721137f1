"""Defines the plan: its schema, the schedule of a step, and what is in which slot when."""
