"""Errors a user sees. Each carries one message (what, where, expected, got, next step) and the exit code of the CLI.

All of them are built from plain strings, so they survive pickling between Ray actors.
"""

from __future__ import annotations

import math


class MegatrainError(Exception):
    """A run failed while running (exit code 1)."""

    exit_code = 1


class ConfigError(MegatrainError):
    """A setting or an input is wrong: fix it and start again (exit code 2)."""

    exit_code = 2


class CapacityError(MegatrainError):
    """What was asked for cannot fit; the message holds the arithmetic (exit code 3). `shortfall`: of the plan that it
    is about (planner/limits.py); infinite where it is about none."""

    exit_code = 3
    shortfall = math.inf


class InterruptedRunError(MegatrainError):
    """The run was interrupted, after a save unless `save_every: null` (exit code 130)."""

    exit_code = 130


class DamagedSaveError(MegatrainError):
    """A save is not what was written; the one before may be."""


class ShardFailedError(MegatrainError):
    """An optimizer shard failed; its own call says why."""


class LostProcessError(MegatrainError):
    """A process died that nobody can follow while the others go on: its state, or that of a step, died with it."""


class LostDeviceError(MegatrainError):
    """The device failed, and the process that uses it can compute nothing more."""


class LostPeerError(LostDeviceError):
    """Another GPU worker does not answer: this one's device, too, can compute nothing more of the step."""


class CaptureError(MegatrainError):
    """What was to be captured on the device cannot be; it runs uncaptured."""


class DeadlineError(MegatrainError):
    """A stage did not finish within its stated bound; the message names the stage."""
