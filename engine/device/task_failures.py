"""Picks the failure to report when several tasks failed together."""

from __future__ import annotations

from megatrain_ray.errors import MegatrainError


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure that caused the others: the first MegatrainError if there is one, else the first failure.

    Cancellations are consequences of another failure, so they are not preferred.
    """
    flat: list[BaseException] = []
    for failure in failures.exceptions:
        flat.append(first_failure(failure) if isinstance(failure, BaseExceptionGroup) else failure)
    own = [f for f in flat if isinstance(f, MegatrainError)]
    return (own or flat)[0]
