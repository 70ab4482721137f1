"""Compares results whose experts are apart with those of whole parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain_ray.engine.layout.expert_names import place_in_whole, whole_name
from tests.support.reference import Result
from tests.support.run_engine import EngineResult

NORM_ERROR = 1e-6  # relative, of norms of gradients whose experts are apart, as docs/rooms/numerics.md says


def joined(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the names of whole parameters, with the parts of each put together."""
    parts: dict[str, list[Tensor]] = {}
    for name in sorted(named, key=lambda name: place_in_whole(name, tuple(named[name].shape)).start):
        parts.setdefault(whole_name(name), []).append(named[name])
    return {name: torch.cat(of_one) if len(of_one) > 1 else of_one[0] for name, of_one in parts.items()}


def assert_same_but_norms(ours: EngineResult, theirs: Result) -> None:
    """Assert that losses, weights and momenta have the same bits."""
    assert ours.losses == theirs.losses
    masters, exp_avg = joined(ours.masters), joined(ours.exp_avg)
    assert masters.keys() == theirs.masters.keys()
    assert [name for name, m in theirs.masters.items() if not torch.equal(masters[name], m)] == []
    assert [name for name, m in theirs.exp_avg.items() if not torch.equal(exp_avg[name], m)] == []
