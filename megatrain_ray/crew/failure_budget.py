"""How many deaths a start of a run makes good."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain_ray.errors import MegatrainError


@dataclass
class FailureBudget:
    """`count` of at most `limit` so far."""

    limit: int
    count: int = 0

    def spend(self, name: str, reason: str = "") -> None:
        """`name` has died. Raises MegatrainError where that was one too many, which begins with `reason`."""
        self.count += 1
        if self.count > self.limit:
            raise MegatrainError(
                f"{reason}{name} died, the run's failure number {self.count} (max_failures: {self.limit}); the same "
                "command resumes"
            )

    def __str__(self) -> str:
        return f"failure {self.count} of at most {self.limit}"
