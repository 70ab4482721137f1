"""Defines number formats: of the compute, of the weights that stream, and of the optimizer state."""

from __future__ import annotations

from enum import Enum
from functools import cached_property

import torch

# Bytes per element by which AdamW's state is larger than Muon's, which has no second moment. Always FP32: with Muon
# moments are never bf16.
SECOND_MOMENT_BYTES = 4
# Printed in a plan, at a run's start and at its end.
NARROW_MOMENTS = "in bf16, stochastically rounded: not what plain PyTorch computes"
FP8_COMPUTE = "products of layers in FP8, scaled by row: less than full precision, not what plain PyTorch computes"
EMULATED = "; emulated on a CPU, for tests: slower than without"


class Precision(Enum):
    """Names the number formats of the compute and of AdamW's moments. Moments are FP32 if they are not named."""

    BF16 = "bf16"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16_NARROW = "bf16 with bf16 moments"
    FP32_NARROW = "fp32 with bf16 moments"
    TF32_NARROW = "tf32 with bf16 moments"

    @classmethod
    def of(cls, compute: str, moments: str) -> Precision:
        """Return the precision for the values of train.precision and train.moments."""
        return cls(compute if moments == "fp32" else f"{compute} with {moments} moments")

    @cached_property
    def compute(self) -> str:
        """Return the compute format as train.precision names it."""
        return self.value.partition(" ")[0]

    @property
    def moments(self) -> str:
        """Return the format of the moments as train.moments names it."""
        return "bf16" if self.moment_dtype is torch.bfloat16 else "fp32"

    @cached_property
    def moment_dtype(self) -> torch.dtype:
        """Return the type of the moments. bf16 is rounded stochastically (optimizer/stochastic_rounding.py)."""
        return torch.float32 if self.value == self.compute else torch.bfloat16

    @cached_property
    def is_split(self) -> bool:
        """Return whether a master is split into working copy and residual; else the working copy is the master."""
        return self.compute == "bf16"

    @cached_property
    def working_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_split else torch.float32

    @cached_property
    def state_kinds(self) -> tuple[tuple[str, torch.dtype], ...]:
        """Return name and type of each kind of state that shards own besides the working copy.

        Together they take 10 bytes per parameter for bf16, else 8; with bf16 moments 6 and 4.
        """
        moments = (("m", self.moment_dtype), ("v", self.moment_dtype))
        return (("residual", torch.int16), *moments) if self.is_split else moments

    @cached_property
    def state_bytes(self) -> int:
        return sum(dtype.itemsize for _, dtype in self.state_kinds)

    @cached_property
    def element_bytes(self) -> int:
        """Return the bytes of working copy and state of one parameter: 12; with bf16 moments 8."""
        return self.working_dtype.itemsize + self.state_bytes
