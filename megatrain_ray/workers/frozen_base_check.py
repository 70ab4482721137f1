"""Computes checksums of frozen parameters that a run leaves out of its saves, since they come from where it began."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain_ray.engine.weights.frozen_checksums import source_checksums, unread_checksums
from megatrain_ray.engine.weights.saved_values import names_of
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.planning.run_spec import RunSpec

Checksums = Sequence[int | None]  # of each layer's frozen part; None: the layer has none


def base_checksums(run_spec: RunSpec, in_memory: Callable[[], Checksums]) -> Checksums:
    """Return the checksum of each layer's frozen part.

    in_memory: returns them as one process has them, which is used on one host. With several hosts no process has all of
        a layer, so the weights are read again.
    """
    if run_spec.plan.hosts.num_hosts == 1:
        return in_memory()
    base, layout = run_spec.source.base_weights(), run_spec.structure.layout()
    return unread_checksums(base, layout, is_split=run_spec.plan.precision.is_split)


def checksums_in(run_spec: RunSpec, manifest: Manifest, known: Checksums) -> Checksums:
    """Return the checksums of the frozen parts by the layers of a save.

    known: of the run's own layers. The weights are read again if blocks were divided differently when the save was
        made.
    """
    layout = run_spec.structure.layout()
    if names_of(manifest.layers) == [[p.name for p in layer.segments] for layer in layout.layers]:
        return known
    return source_checksums(run_spec.source.base_weights(), manifest)
