"""Defines the errors that a user sees.

Each carries one message (what, where, expected, got, next step) and the exit code of the CLI. All are built from plain
strings, so they survive pickling between Ray actors.
"""

from __future__ import annotations

import math

from megatrain_ray.escapes import escaped


class MegatrainError(Exception):
    """Reports that a run failed while running (exit code 1).

    Each argument is a line of the message. Names from outside cannot add lines to it: line ends in them are escaped.
    """

    exit_code = 1

    def __str__(self) -> str:
        return "\n".join(escaped(str(line)) for line in self.args)


class ConfigError(MegatrainError):
    """Reports that a setting or an input is wrong: fix it and start again (exit code 2)."""

    exit_code = 2


class NothingToLearnError(ConfigError):
    """Reports data without a token to learn. A portion of a stream may be like that."""


class NotPreparedError(MegatrainError):
    """Says that the data of a step are still being fetched and tokenised: ask again."""


class CapacityError(MegatrainError):
    """Says that a request cannot fit; the message holds the arithmetic (exit code 3).

    shortfall: weighted bytes that the plan in question lacks (planner/limits.py); infinite if no plan is in question.
    """

    exit_code = 3
    shortfall = math.inf


class InterruptedRunError(MegatrainError):
    """Reports that the run was interrupted, after a save unless `save_every: null` (exit code 130)."""

    exit_code = 130


class SamplingError(MegatrainError):
    """Reports that a server does not sample. The weights are intact, so the run saves before it ends."""


class DamagedSaveError(MegatrainError):
    """Reports that a save is not what was written. The save before it may be intact."""


class ShardFailedError(MegatrainError):
    """Reports that an optimizer shard failed. The error of the shard's own call says why."""


class LostProcessError(MegatrainError):
    """Reports a death that cannot be made good while the others go on: state, or a step, died with the process."""


class LostDeviceError(MegatrainError):
    """Reports that the device failed, so that its process can compute nothing more."""


class LostPeerError(LostDeviceError):
    """Reports that another GPU worker does not answer, so this one cannot compute the rest of the step either."""


class CaptureError(MegatrainError):
    """Reports that work cannot be captured as a graph on the device, so that it runs uncaptured."""


class DeadlineError(MegatrainError):
    """Reports that a stage did not finish within its stated bound. The message names the stage."""


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure that caused the others: the first MegatrainError if there is one, else the first failure.

    Cancellations are consequences of another failure, so they are not preferred.
    """
    flat: list[BaseException] = []
    for failure in failures.exceptions:
        flat.append(first_failure(failure) if isinstance(failure, BaseExceptionGroup) else failure)
    own = [f for f in flat if isinstance(f, MegatrainError)]
    return (own or flat)[0]
