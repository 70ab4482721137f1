"""Chooses the error that the user reads when an actor has failed."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayError, RayTaskError

from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.errors import LostDeviceError, MegatrainError, ShardFailedError


def understood(error: RayError, crew: WorkerGroup) -> MegatrainError:
    """Return the error that the user should read.

    This is our own error if an actor raised one. The error of a shard's own task comes before those that followed from
    it.
    """
    for failure in (*crew.failures(), error):
        cause = failure.cause if isinstance(failure, RayTaskError) else failure
        if isinstance(cause, MegatrainError) and not isinstance(cause, ShardFailedError):
            return cause
        if isinstance(cause, RayActorError):
            return crew.explain(cause)
    return MegatrainError(f"an actor failed: {type(error).__name__}: {error}")


def may_be_of_a_node(error: RayError) -> bool:
    """Return whether an error may come from the loss of a whole node.

    It may if a process or a device was lost. Any other error already says what is wrong.
    """
    return isinstance(error, RayActorError) or isinstance(getattr(error, "cause", None), LostDeviceError)
