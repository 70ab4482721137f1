"""What to tell of tasks that failed together."""

from __future__ import annotations

from megatrain_ray.errors import MegatrainError


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that the others followed from: cancellations come second."""
    flat: list[BaseException] = []
    for failure in failures.exceptions:
        flat.append(first_failure(failure) if isinstance(failure, BaseExceptionGroup) else failure)
    own = [f for f in flat if isinstance(f, MegatrainError)]
    return (own or flat)[0]
