"""How several GPU workers divide what Muon trains: whole matrices, evenly, and what each then moves."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatrain_ray.engine.device.ranks import RankParts
from megatrain_ray.engine.host.shared_host import Momenta
from megatrain_ray.engine.layout.flat_layout import ElementRange, FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.muon import MatrixPart, largest_part, matrix_parts, step_flops

Matrices = tuple[tuple[str, tuple[int, ...]], ...]

NORM = ("norm", (64,))
# Of a decoder's block: attention, then an MLP with most of the work.
DENSE: Matrices = (
    *((f"{name}_proj", (64, 64)) for name in "qkvo"),
    ("gate_proj", (192, 64)),
    ("up_proj", (192, 64)),
    ("down_proj", (64, 192)),
)
EXPERTS: Matrices = (("q_proj", (64, 64)), ("gate_up", (7, 64, 96)), ("down", (7, 48, 64)))


def layer(*matrices: tuple[str, tuple[int, ...]], number: int = 0) -> FlatLayout:
    """Return a block with these matrices, and a norm in front of them that AdamW trains."""
    specs = [ParameterSpec(f"{number}.{name}", name, shape, muon=name != "norm") for name, shape in (NORM, *matrices)]
    return FlatLayout.build(str(number), specs)


def model(*matrices: tuple[str, tuple[int, ...]], num_layers: int = 6) -> ModelLayout:
    """Return a model of such blocks, behind an embedding that AdamW trains."""
    embedding = FlatLayout.build("embedding", [ParameterSpec("embed", "embed", (100, 64))])
    layers = (embedding, *(layer(*matrices, number=number) for number in range(num_layers)))
    return ModelLayout(layers, tuple(segment.name for flat in layers for segment in flat.segments))


def work(flat: FlatLayout, span: ElementRange) -> int:
    """Return the FLOPs of the matrices in a part, which must have no pieces of matrices."""
    flops = 0
    for run in flat.runs(span):
        if run.segment.muon:
            size = math.prod(run.segment.shape[-2:])
            assert run.in_segment % size == run.length % size == 0, "a piece of a matrix"
            flops += run.length // size * step_flops(run.segment.shape)
    return flops


@pytest.mark.parametrize("matrices", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 30])
def test_parts_cover_a_layer_and_hold_whole_matrices(matrices: Matrices, num_ranks: int) -> None:
    flat = layer(*matrices)
    parts = matrix_parts(flat, num_ranks)
    assert len(parts) == num_ranks
    assert (parts[0].span.start, parts[-1].span.stop) == flat.trained
    assert all(a.span.stop == b.span.start for a, b in itertools.pairwise(parts))
    assert parts[0].span.stop >= flat.adamw.stop, "what AdamW trains is one rank's"
    assert [part.flops for part in parts] == [work(flat, part.span) for part in parts]
    total = sum(math.prod(shape[:-2]) * step_flops(shape) for _, shape in matrices)
    most = max(step_flops(shape) for _, shape in matrices)
    assert max(part.flops for part in parts) < total / num_ranks + most, "cuts are next to equal work"


def test_two_ranks_divide_a_block_behind_its_gate_proj() -> None:
    """The cut is the one next to a half of the FLOPs.

    In units of 2 · 64³ FLOPs a matrix of attention has 3, one of the MLP 7, and all have 33: the cut is at 19. The norm
    in front is padded to 2048 elements.
    """
    flat, unit = layer(*DENSE), 2 * 64**3
    first = ElementRange(0, 2048 + 4 * 64 * 64 + 192 * 64)
    second = ElementRange(first.stop, first.stop + 2 * 192 * 64)
    assert matrix_parts(flat, 2) == (MatrixPart(first, 19 * unit), MatrixPart(second, 14 * unit))
    assert largest_part(flat, 2) == 30720


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_ranks_have_as_much_of_all_layers_together(num_ranks: int) -> None:
    """Two ranks cannot have as much of one layer: of three matrices of the MLP one has two."""
    layout = model(*DENSE, num_layers=24)
    spans = [
        [RankParts(layout, rank, num_ranks).gradient_span(i) for i in layout.with_muon] for rank in range(num_ranks)
    ]
    for i, of_ranks in zip(layout.with_muon, zip(*spans, strict=True), strict=True):
        assert sorted(of_ranks) == sorted(part.span for part in matrix_parts(layout.layers[i], num_ranks))
    loads = [sum(work(layout.layers[i], span) for i, span in zip(layout.with_muon, own, strict=True)) for own in spans]
    of_layer = sum(part.flops for part in matrix_parts(layout.layers[1], num_ranks))
    assert sum(loads) == 24 * of_layer
    assert max(loads) - min(loads) <= max(part.flops for part in matrix_parts(layout.layers[1], num_ranks))


def test_of_the_experts_of_a_stack_each_rank_has_some() -> None:
    flat = layer(*EXPERTS)
    flops = [part.flops for part in matrix_parts(flat, 4)]
    assert max(flops) < 1.2 * sum(flops) / 4


def test_layers_of_adamw_are_divided_as_ever_and_uploads_too() -> None:
    """Parts of what is uploaded are equal, whatever Muon trains."""
    layout = model(*DENSE)
    for rank in range(4):
        parts = RankParts(layout, rank, 4)
        assert parts.gradient_span(0) == parts.upload_spans_of_all(0)[0][rank]
        assert parts.upload_spans(1) == (parts.upload_spans_of_all(1)[0][rank],)
        assert parts.upload_spans(1)[0].size == layout.layers[1].trained.size // 4


def test_momenta_of_a_part_come_from_whichever_shards_have_it() -> None:
    """The part reaches from the middle of the first of three shards to the middle of the last."""
    layout = model(*DENSE, num_layers=2)
    shards = [ShardLayout(layout, index, 3) for index in range(3)]
    flats = [torch.arange(1000.0 * i, 1000.0 * i + flat.trained.size) for i, flat in enumerate(layout.layers)]
    m = [torch.cat([flat[span.start : span.stop] for flat, span in zip(flats, s.spans, strict=True)]) for s in shards]
    momenta = Momenta(shards, m)
    for span in (
        ElementRange(1, layout.layers[2].trained.size - 1),
        ElementRange(shards[1].spans[2].start, shards[1].spans[2].stop),
    ):
        found = torch.full((span.size,), torch.nan)
        for part in momenta.of(2, span):
            found[part.start : part.start + part.values.numel()] = part.values
        assert torch.equal(found, flats[2][span.start : span.stop])
    assert len(momenta.of(2, ElementRange(1, layout.layers[2].trained.size - 1))) == 3
    assert [(part.start, part.values.numel()) for part in momenta.of(2, ElementRange(7, 7))] == [(0, 0)]
