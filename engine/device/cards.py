"""Makes hardware profiles of GPUs that were not measured, from their published figures (cards.yaml).

A card's products, attention and memory are those of the measured H200, in proportion to the published figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU, HardwareProfile, MachineName, RateCurve, RatePoint

REFERENCE = "h200"  # the card that TYPICAL_GPU was measured on
USABLE = 0.98  # share of its memory that a card offers to programs: CUDA reports 0.98 to 0.99 of it
GIB = 1 << 30


@dataclass(frozen=True)
class CardHost:
    """Holds the rates of a host: GB/s, and billions of parameters per second."""

    cpu: str
    cores: int
    triad: float
    each_way: float
    adamw: float
    busy: float


@dataclass(frozen=True)
class Card:
    """Holds the published figures of a GPU: TFLOPS of dense products by precision, GB/s, GiB.

    reached: share of what an H200 makes of its published figures.
    fp8: whether it multiplies FP8, which cards that do are published to do twice as fast as bf16.
    """

    gpu: str
    gib: float
    bf16: float
    tf32: float
    fp32: float
    memory: float
    pcie: int
    host: str
    reached: float
    source: str
    fp8: bool = True

    @property
    def memory_bytes(self) -> int:
        return int(USABLE * self.gib * GIB)


@dataclass(frozen=True)
class _Table:
    cards: Mapping[str, Card]
    hosts: Mapping[str, CardHost]


@cache
def _table() -> _Table:
    text = Path(__file__).with_name("cards.yaml").read_text(encoding="utf-8")
    return TypeAdapter(_Table).validate_python(yaml.safe_load(text))


def cards() -> Mapping[str, Card]:
    """Return the cards by the names that hardware.profile takes."""
    return _table().cards


def card_for(memory_bytes: int) -> str:
    """Return the name of the smallest card with so much memory, or of the largest one if none has."""
    by_size = sorted(cards(), key=lambda name: cards()[name].gib)  # sorted keeps the order of equal cards
    return next((name for name in by_size if cards()[name].gib * GIB >= memory_bytes), by_size[-1])


def rates_of(name: str) -> HardwareProfile:
    """Return the rates of a card by its name, and of a host that such a card is typically in."""
    card, reference = cards()[name], cards()[REFERENCE]
    host = _table().hosts[card.host]
    link = 2.0 ** (card.pcie - reference.pcie)  # each generation is twice as fast
    return replace(
        TYPICAL_GPU,
        machine=MachineName(card.gpu, "", TYPICAL_GPU.machine.torch, host.cpu, host.cores),
        h2d_bytes_per_s=link * TYPICAL_GPU.h2d_bytes_per_s,
        d2h_bytes_per_s=link * TYPICAL_GPU.d2h_bytes_per_s,
        both_bytes_per_s=min(link * TYPICAL_GPU.both_bytes_per_s, 1e9 * host.each_way),
        triad_bytes_per_s=1e9 * host.triad,
        adamw_per_s=1e9 * host.adamw,
        adamw_busy_per_s=1e9 * host.busy,
        device_bytes_per_s=card.memory / reference.memory * TYPICAL_GPU.device_bytes_per_s,
        matmul={
            name: _scaled(curve, card.reached * getattr(card, of) / getattr(reference, of))
            for name, curve in TYPICAL_GPU.matmul.items()
            if card.fp8 or name != "fp8"
            for of in ["bf16" if name == "fp8" else name]
        },
        attention=tuple(
            RatePoint(point.size, point.per_s * card.reached * card.bf16 / reference.bf16)
            for point in TYPICAL_GPU.attention
        ),
    )


def _scaled(curve: RateCurve, factor: float) -> RateCurve:
    """Return the curve of a device that takes as long for `factor` times the work."""
    return tuple(RatePoint(factor * point.size, factor * point.per_s) for point in curve)
