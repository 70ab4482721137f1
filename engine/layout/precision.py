"""Number formats: of what is computed, of what streams, and of the state of an optimizer."""

from __future__ import annotations

from enum import Enum
from functools import cached_property

import torch

SECOND_MOMENT_BYTES = 4  # of an element; what Muon trains has none, and where it trains anything moments are FP32
# Told in a plan, at a run's start and at its end.
NARROW_MOMENTS = "in bf16, stochastically rounded: not what plain PyTorch computes"


class Precision(Enum):
    """Number formats: of the compute, and of AdamW's moments, FP32 where they are not named."""

    BF16 = "bf16"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16_NARROW = "bf16 with bf16 moments"
    FP32_NARROW = "fp32 with bf16 moments"
    TF32_NARROW = "tf32 with bf16 moments"

    @classmethod
    def of(cls, compute: str, moments: str) -> Precision:
        """From train.precision and train.moments."""
        return cls(compute if moments == "fp32" else f"{compute} with {moments} moments")

    @cached_property
    def compute(self) -> str:
        """As train.precision names it."""
        return self.value.partition(" ")[0]

    @property
    def moments(self) -> str:
        """As train.moments names it."""
        return "bf16" if self.moment_dtype is torch.bfloat16 else "fp32"

    @cached_property
    def moment_dtype(self) -> torch.dtype:
        """bf16 is rounded stochastically (optimizer/stochastic_rounding.py)."""
        return torch.float32 if self.value == self.compute else torch.bfloat16

    @cached_property
    def is_split(self) -> bool:
        """Whether a master is a working copy and a residual; else the working copy is the master."""
        return self.compute == "bf16"

    @cached_property
    def working_dtype(self) -> torch.dtype:
        """Of the working copy: what streams."""
        return torch.bfloat16 if self.is_split else torch.float32

    @cached_property
    def state_kinds(self) -> tuple[tuple[str, torch.dtype], ...]:
        """Shard-owned state beside the working copy: 10 bytes per parameter for bf16, else 8; with narrow moments 6
        and 4."""
        moments = (("m", self.moment_dtype), ("v", self.moment_dtype))
        return (("residual", torch.int16), *moments) if self.is_split else moments

    @cached_property
    def state_bytes(self) -> int:
        """Of the state of one parameter."""
        return sum(dtype.itemsize for _, dtype in self.state_kinds)

    @cached_property
    def element_bytes(self) -> int:
        """Of one parameter, working copy and state: 12; with narrow moments 8."""
        return self.working_dtype.itemsize + self.state_bytes
