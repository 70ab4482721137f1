"""How long anything may take before it counts as stuck. Every wait is bounded by one of these."""

from __future__ import annotations

# For what takes seconds at most on any machine that works: a copy, a signal, the start of a process.
DEADLINE_S = 600.0
# For a step, the first one with its compilation included.
STEP_DEADLINE_S = 3600.0
# A disk slower than this counts as stuck. A single spinning one makes ten times as much.
SLOWEST_BYTES_PER_S = 15e6


def transfer_deadline_s(num_bytes: int) -> float:
    """For reading or writing `num_bytes` of files."""
    return DEADLINE_S + num_bytes / SLOWEST_BYTES_PER_S
