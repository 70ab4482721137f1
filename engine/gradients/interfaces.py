"""Defines where a step gets its layers from and where it leaves its gradients.

In training layers are streamed and gradients are stored. To measure the resident ceiling, all layers stay on the device
and gradients are discarded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from megatrain_ray.engine.gradients.gradient_offloader import LoadGradient, OffloadGradient
from megatrain_ray.engine.model.chunked_loss import OpenSum
from megatrain_ray.engine.plan.residency import FragmentId


class LayerSource(Protocol):
    """Provides the layers of each visit. Implemented by LayerStreamer, NoStreamer and ResidentLayers."""

    def layer(self, visit: int) -> AbstractContextManager[Mapping[FragmentId, torch.Tensor]]:
        """Return a context that yields the visit's fragments on the device.

        They are in use until the context ends. Compute thread only.
        """


class GradientTaker(Protocol):
    """Receives gradients. Implemented by GradientStore, which documents each method, and by NoGradients."""

    norms: dict[str, torch.Tensor]

    def begin(self) -> None: ...

    def open_sums(self, layer: int, names: Collection[str]) -> dict[str, OpenSum]: ...

    def add(self, layer: int, gradients: Mapping[str, torch.Tensor | None], *, last: bool) -> None: ...

    def offload_partial(self, layer: int) -> OffloadGradient: ...

    def load_partial(self, layer: int) -> LoadGradient: ...

    def finalize(self, layer: int) -> OffloadGradient | None: ...

    def pop_deferred(self, layer: int) -> torch.Tensor: ...

    def offload_deferred(self, layer: int) -> OffloadGradient: ...

    def total_norm(self) -> torch.Tensor: ...
