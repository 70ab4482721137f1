"""Where bytes live."""

from __future__ import annotations

from enum import Enum


class Tier(Enum):
    HBM = "hbm"
    HOST = "host"
    NVME = "nvme"

    __hash__ = object.__hash__  # Enum's own is Python, and the search asks for it all the time


ELSEWHERE = (Tier.HOST, Tier.NVME)  # than on the device
