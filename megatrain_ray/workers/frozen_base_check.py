"""Checksums of what a run leaves out of its saves, because it comes from where the run began."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain_ray.engine.weights.frozen_checksums import source_checksums, unread_checksums
from megatrain_ray.engine.weights.restore import names_of
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.planning.prepare import Prepared

Checksums = Sequence[int | None]  # of what is frozen of each layer


def base_checksums(prepared: Prepared, in_memory: Callable[[], Checksums]) -> Checksums:
    """`in_memory`: as one process has it where there is one host. Of several none has all of it: it is read again."""
    if prepared.plan.num_hosts == 1:
        return in_memory()
    base, layout = prepared.source.base_weights(), prepared.structure.layout()
    return unread_checksums(base, layout, is_split=prepared.plan.precision.is_split)


def checksums_in(prepared: Prepared, manifest: Manifest, known: Checksums) -> Checksums:
    """Of the layers of a save. `known`: of the run's; read again where blocks were divided otherwise when the save was
    made."""
    layout = prepared.structure.layout()
    if names_of(manifest.layers) == [[p.name for p in layer.segments] for layer in layout.layers]:
        return known
    return source_checksums(prepared.source.base_weights(), manifest)
