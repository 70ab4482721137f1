from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_ray.engine.layout import (
    ALIGN_ELEMENTS,
    CUT_ELEMENTS,
    FlatLayout,
    ModelLayout,
    ParameterSpec,
    ShardLayout,
    Span,
)

shapes = st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)


def build(parameter_shapes: list[tuple[int, ...]], num_fragments: int = 1) -> FlatLayout:
    specs = [ParameterSpec(f"layer.p{i}", f"p{i}", shape) for i, shape in enumerate(parameter_shapes)]
    return FlatLayout.build("layer", specs, num_fragments)


@given(shapes, st.integers(1, 5))
def test_parameters_are_aligned_and_apart(parameter_shapes: list[tuple[int, ...]], num_fragments: int) -> None:
    layout = build(parameter_shapes, num_fragments)
    assert layout.size % CUT_ELEMENTS == 0
    assert layout.logical_size == sum(math.prod(s) for s in parameter_shapes)
    position = 0
    for segment in layout.segments:
        assert segment.start % ALIGN_ELEMENTS == 0
        assert segment.start >= position
        position = segment.stop
    assert position <= layout.size


@given(shapes, st.integers(1, 5))
def test_fragments_cover_the_layer_and_cut_no_parameter(parameter_shapes: list[tuple[int, ...]], count: int) -> None:
    layout = build(parameter_shapes, count)
    assert layout.fragments[0].start == 0
    assert all(a.stop == b.start for a, b in pairwise(layout.fragments))
    assert len(layout.fragments) <= count
    for segment in layout.segments:
        assert sum(f.start <= segment.start and segment.stop <= f.stop for f in layout.fragments) == 1


@given(shapes, st.integers(1, 7))
def test_cuts_cover_the_layer_on_safe_boundaries(parameter_shapes: list[tuple[int, ...]], num_shards: int) -> None:
    layout = build(parameter_shapes)
    cuts = layout.cuts(num_shards)
    assert len(cuts) == num_shards
    assert (cuts[0].start, cuts[-1].stop) == (0, layout.size)
    assert all(a.stop == b.start for a, b in pairwise(cuts))
    assert all(cut.start % CUT_ELEMENTS == 0 for cut in cuts)


@given(shapes, st.integers(1, 5))
def test_runs_of_all_shards_are_every_element_once(parameter_shapes: list[tuple[int, ...]], num_shards: int) -> None:
    layout = build(parameter_shapes)
    seen = torch.zeros(layout.size, dtype=torch.int32)
    logical = 0
    for cut in layout.cuts(num_shards):
        assert layout.logical(cut).start == logical
        for run in layout.runs(cut):
            assert run.logical == logical
            assert run.padded == run.segment.start + run.in_segment
            seen[run.padded : run.padded + run.length] += 1
            logical += run.length
        assert layout.logical(cut).stop == logical
    assert logical == layout.logical_size
    for segment in layout.segments:
        assert (layout.view(seen, segment.name) == 1).all()
    assert int(seen.sum()) == layout.logical_size


def test_views_share_memory_and_shape() -> None:
    layout = build([(3, 5), (7,)])
    flat = torch.zeros(layout.size)
    layout.view(flat, "layer.p0").fill_(1)
    assert layout.view(flat, "layer.p0").shape == (3, 5)
    assert flat.sum() == 15
    assert layout.segments[1].start == ALIGN_ELEMENTS


def test_a_tied_parameter_owns_nothing() -> None:
    head = FlatLayout.build(
        "head",
        [ParameterSpec("norm.weight", "weight", (8,)), ParameterSpec("head.weight", "weight", (9, 8), tied_to="e")],
    )
    assert head.logical_size == 8
    assert [s.name for s in head.owned] == ["norm.weight"]


def test_shards_store_their_parts_one_after_the_other() -> None:
    model = ModelLayout((build([(100, 100)]), build([(64,)])), ())
    shards = [ShardLayout(model, k, 3) for k in range(3)]
    assert sum(s.size for s in shards) == model.size
    for shard in shards:
        assert shard.starts == (0, shard.spans[0].size)
        assert shard.slice(1) == slice(shard.spans[0].size, shard.size)
    # A layer of one cut belongs to one shard; the others own an empty span of it.
    assert [s.spans[1] for s in shards] == [Span(0, 0), Span(0, 0), Span(0, 2048)]
