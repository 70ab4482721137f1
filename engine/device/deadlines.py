"""Defines how long an operation may take before it counts as stuck. Every wait is bounded by one of these deadlines."""

from __future__ import annotations

# For operations that take at most seconds on any working machine: a copy, a signal, the start of a process.
DEADLINE_S = 600.0
# For one step. The first one includes compilation.
STEP_DEADLINE_S = 3600.0
# A disk slower than this counts as stuck. A single spinning disk is ten times as fast.
SLOWEST_BYTES_PER_S = 15e6


def transfer_deadline_s(num_bytes: int) -> float:
    """Return the deadline in seconds for reading or writing `num_bytes` of files."""
    return DEADLINE_S + num_bytes / SLOWEST_BYTES_PER_S
