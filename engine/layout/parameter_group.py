"""How a parameter is trained, if it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterGroup:
    """Its learning rate is that of the step times `lr_scale`. `weight_decay`: None: the run's, where the parameter
    decays at all. `muon`: None: as the run's optimizer says."""

    trained: bool = True
    lr_scale: float = 1.0
    weight_decay: float | None = None
    muon: bool | None = None


COMMON = ParameterGroup()
FROZEN = ParameterGroup(trained=False)
