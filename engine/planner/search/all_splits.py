"""Lists the searches for a plan: one for each split into micro-batches, for large ones also with chunked MLPs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import largest_share
from megatrain_ray.engine.model.flops import work_of
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.memory.mlp_chunks import may_chunk, mlp_chunk_tokens
from megatrain_ray.engine.planner.request import Machine, Request
from megatrain_ray.engine.planner.search.candidates import splits
from megatrain_ray.engine.planner.search.split_search import Found, SplitSearch


def basis_of(structure: ModelStructure, machine: Machine, request: Request) -> CostBasis:
    """Return what predictions of all plans for a request share."""
    layout = largest_share(structure.layout(request.num_fragments), request.num_hosts)
    work = work_of(structure, request.active_experts, request.windows)
    spill = machine.spill
    disk = (spill.bytes_per_s, spill.plain_bytes_per_s) if spill else ()
    return CostBasis(structure, layout, work, machine.rates, machine.profile is not None, request.z_loss, *disk)


def searches(
    basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes, found: Found
) -> Iterator[SplitSearch]:
    """Yield a search for each split, and a second one with MLPs in chunks if its micro-batches are large.

    found: collects the plans that fit.
    """
    for split in splits(request):
        of_split = activations.times(split.micro_batch_size // request.micro_batch_size)
        yield SplitSearch(basis, machine, split, of_split, found)
        tokens = split.micro_batch_size * split.seq_len
        if not may_chunk(tokens, split.seq_len, has_disk=machine.spill is not None):
            continue
        chunk_tokens = mlp_chunk_tokens(basis.structure, tokens)
        if chunk_tokens and (in_chunks := of_split.in_chunks()):
            yield SplitSearch(basis, machine, replace(split, mlp_chunk_tokens=chunk_tokens), in_chunks, found)
