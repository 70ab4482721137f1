"""Describes how a parameter is trained, if it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterGroup:
    """Describes how the parameters of a group are trained.

    lr_scale: factor on the learning rate of the step.
    weight_decay: None: the run's weight decay, if the parameter decays at all.
    muon: whether Muon trains it; None: as the run's optimizer says.
    """

    trained: bool = True
    lr_scale: float = 1.0
    weight_decay: float | None = None
    muon: bool | None = None


COMMON = ParameterGroup()
FROZEN = ParameterGroup(trained=False)
