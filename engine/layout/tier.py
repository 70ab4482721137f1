"""Names the tiers of memory that bytes live in."""

from __future__ import annotations

from enum import Enum


class Tier(Enum):
    HBM = "hbm"
    HOST = "host"
    NVME = "nvme"

    __hash__ = object.__hash__  # Enum.__hash__ is Python code, and the plan search hashes members all the time


ELSEWHERE = (Tier.HOST, Tier.NVME)  # all tiers except the device's
