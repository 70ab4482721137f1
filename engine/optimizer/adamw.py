"""Holds what an update of AdamW or Muon is given: constants, what varies from update to update, and state."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal, NamedTuple, assert_never

from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.optimizer.muon import Muon

BLOCK_ELEMENTS = 1 << 18  # a multiple of 64; what a block reads and writes is then about 6 MiB
_FIELDS = "<qqddqq"  # of UpdateParams, as struct packs them: 8 bytes each


@dataclass(frozen=True)
class AdamWConstants:
    """Holds AdamW's constants, as `torch.optim.AdamW` takes them, and Muon's, if it trains anything."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # of parameters that decay and whose group sets none of its own, also of those that Muon trains
    muon: Muon | None = None
    moments_seed: int | None = None  # of the random bits that round bf16 moments; None: moments are FP32


@dataclass(frozen=True)
class UpdateParams:
    """Holds what is fixed before the first write of an update, all the way from the engine to the kernels."""

    update: int  # number of the step whose gradients it consumes, from 1
    adam_step: int  # AdamW's own step count, which skipped updates do not advance
    lr: float
    scale: float = 1.0  # multiplies gradients, an FP32 value
    skip: bool = False  # change nothing
    # A save wants the generation that this update makes. No layer may go beyond it before it is written or copied.
    save: bool = False

    def to_words(self) -> tuple[int, ...]:
        """Return the fields as signed 64-bit words. Floats keep their exact bits, NaNs included."""
        return struct.unpack("<6q", struct.pack(_FIELDS, *astuple(self)))

    @classmethod
    def from_words(cls, words: Sequence[int]) -> UpdateParams:
        update, adam_step, lr, scale, skip, save = struct.unpack(_FIELDS, struct.pack("<6q", *words))
        return cls(update, adam_step, lr, scale, bool(skip), bool(save))


class ParamWeighting(NamedTuple):
    """Holds what differs from parameter to parameter."""

    lr_scale: float  # multiplies the update's learning rate
    weight_decay: float
    lr_ratio: float = 1.0  # multiplies it as well where Muon moves the parameter, but not where it decays it


class Coefficients(NamedTuple):
    """Holds torch's coefficients of an update, the same for all parameters: doubles, which a kernel rounds to FP32."""

    m_weight: float
    v_keep: float
    v_weight: float
    root: float  # square root of v's bias correction

    @classmethod
    def of(cls, hyper: AdamWConstants, params: UpdateParams) -> Coefficients:
        root = math.sqrt(1 - hyper.beta2**params.adam_step)
        return cls(1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, root)


class ParamCoefficients(NamedTuple):
    """Holds how an update moves one parameter: it decays, then steps along a direction.

    AdamW's direction is m divided by the root of v. Both numbers are doubles, which a kernel rounds to FP32.
    """

    decay: float
    step_size: float


class AdamState(NamedTuple):
    """Holds some elements of one parameter, in 1-D tensors of equal length."""

    working: Tensor  # bf16 if the master is split, else the FP32 master itself
    residual: Tensor | None  # int16 if the master is split, else None
    m: Tensor  # fp32 or bf16
    v: Tensor | None  # as m; None for a parameter that Muon trains

    def cut(self, span: ElementRange) -> AdamState:
        part = slice(*span)
        residual = None if self.residual is None else self.residual[part]
        return AdamState(self.working[part], residual, self.m[part], None if self.v is None else self.v[part])


Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, peak: float, min_lr: float, steps: int, warmup_steps: int, schedule: Schedule, from_zero: bool = False
) -> float:
    """Return the learning rate of `step` (1-based) in a run of `steps` updates.

    Warm-up: peak * step / warmup_steps, so that step 1 has a rate above zero and step `warmup_steps` has the peak.
    `from_zero`: peak * (step - 1) / warmup_steps, as in transformers.get_scheduler, so that step 1 has a rate of zero.

    After it, with progress = (step - 1 - warmup_steps) / (steps - warmup_steps) in [0, 1): `cosine` is min_lr + (peak -
    min_lr) * (1 + cos(pi * progress)) / 2, and `linear` is peak - (peak - min_lr) * progress. They would reach min_lr
    in the step after the last, so that no update of a run is made at a rate of zero.
    """
    if step <= warmup_steps:
        return peak * (step - from_zero) / warmup_steps
    progress = (step - 1 - warmup_steps) / (steps - warmup_steps)
    match schedule:
        case "constant":
            return peak
        case "linear":
            return peak - (peak - min_lr) * progress
        case "cosine":
            return min_lr + (peak - min_lr) * (1 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(schedule)
