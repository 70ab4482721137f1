"""Layouts of any parameters: every element has one place, in every coordinate system and for every number of shards."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_ray.engine.layout.flat_layout import (
    ALIGN_ELEMENTS,
    COMMON,
    CUT_ELEMENTS,
    FROZEN,
    NODE_CUT_ELEMENTS,
    ElementRange,
    FlatLayout,
    ParameterSpec,
)
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.shard_layout import ShardLayout

shapes = st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)
granularities = st.sampled_from([CUT_ELEMENTS, 3 * CUT_ELEMENTS, NODE_CUT_ELEMENTS])
VECTOR_ELEMENTS = 64  # torch's vectorised AdamW rounds alike whatever is cut off at a multiple of these


@st.composite
def layers(draw: st.DrawFn, *, mixed: bool = False) -> FlatLayout:
    """Draw any parameters, some of them tied to one of another layer, in any number of fragments.

    mixed: some are frozen, and some are read in FP32.
    """
    specs = [
        ParameterSpec(
            f"p{i}", f"p{i}", shape, tied_to=draw(st.sampled_from([None, None, None, "elsewhere"])),
            group=draw(st.sampled_from([COMMON, FROZEN])) if mixed else COMMON, fp32=mixed and draw(st.booleans()),
        )
        for i, shape in enumerate(draw(shapes))
    ]  # fmt: skip
    return FlatLayout.build("layer", specs, draw(st.integers(1, 5)))


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
    cuts = layout.cuts(layout.trained, num_shards)
    assert len(cuts) == num_shards
    assert (cuts[0].start, cuts[-1].stop) == (0, layout.size)
    assert all(a.stop == b.start for a, b in pairwise(cuts))
    assert all(cut.start % CUT_ELEMENTS == 0 for cut in cuts)


@given(shapes, st.integers(1, 5))
def test_runs_of_all_shards_are_every_element_once(parameter_shapes: list[tuple[int, ...]], num_shards: int) -> None:
    layout = build(parameter_shapes)
    seen = torch.zeros(layout.size, dtype=torch.int32)
    logical = 0
    for cut in layout.cuts(layout.trained, num_shards):
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
    assert [s.spans[1] for s in shards] == [ElementRange(0, 0), ElementRange(0, 0), ElementRange(0, 2048)]


@given(layers(), st.integers(1, 9), granularities)
def test_cuts_lie_on_vector_boundaries_of_every_parameter(
    layout: FlatLayout, num_shards: int, granularity: int
) -> None:
    cuts = layout.cuts(layout.trained, num_shards, granularity)
    assert [cut.start for cut in cuts[1:]] == [cut.stop for cut in cuts[:-1]]
    assert (cuts[0].start, cuts[-1].stop) == (0, layout.size)
    for cut in cuts:
        assert cut.start % granularity == 0 or cut.start == layout.size
        assert all(run.in_segment % VECTOR_ELEMENTS == 0 for run in layout.runs(cut))
    assert max(cut.size for cut in cuts) <= granularity * math.ceil(math.ceil(layout.size / granularity) / num_shards)


@given(layers(), st.data())
def test_logical_and_padded_are_each_others_inverse(layout: FlatLayout, data: st.DataObject) -> None:
    """It holds for any span, whether it begins and ends in parameters or in the padding between them."""
    padded_of = torch.full((layout.logical_size,), -1)
    for run in layout.runs(ElementRange(0, layout.size)):
        padded_of[run.logical : run.logical + run.length] = torch.arange(run.padded, run.padded + run.length)
    assert (padded_of.diff() > 0).all() and (padded_of >= 0).all()
    start = data.draw(st.integers(0, layout.size))
    span = ElementRange(start, data.draw(st.integers(start, layout.size)))
    logical = layout.logical(span)
    inside = (padded_of >= span.start) & (padded_of < span.stop)
    assert inside.nonzero().flatten().tolist() == list(range(logical.start, logical.stop))
    runs = list(layout.runs(span))
    assert sum(run.length for run in runs) == logical.size
    for run in runs:
        assert torch.equal(padded_of[run.logical : run.logical + run.length] - run.padded, torch.arange(run.length))
        assert run.padded == run.segment.start + run.in_segment
        assert span.start <= run.padded and run.padded + run.length <= span.stop


@given(layers())
def test_views_are_apart_aligned_and_inside_one_fragment(layout: FlatLayout) -> None:
    flat = torch.zeros(layout.size, dtype=torch.int16)
    for number, segment in enumerate(layout.owned, 1):
        view = layout.view(flat, segment.name)
        assert (view.shape, view.data_ptr() - flat.data_ptr()) == (segment.shape, 2 * segment.start)
        assert segment.start % ALIGN_ELEMENTS == 0
        assert not view.any(), "no other parameter lies there"
        view.fill_(number)
        assert sum(f.start <= segment.start and segment.stop <= f.stop for f in layout.fragments) == 1
    assert flat.count_nonzero() == layout.logical_size
    within = torch.cat([torch.zeros(3, dtype=flat.dtype), flat])[3:]
    views = layout.trained_views(within)
    assert list(views) == [segment.name for segment in layout.trained_segments]
    for name, view in views.items():
        same = layout.view(within, name)
        assert (view.data_ptr(), view.shape, view.stride()) == (same.data_ptr(), same.shape, same.stride())


@given(st.lists(layers(), min_size=1, max_size=4), st.integers(1, 6), granularities)
def test_shards_own_every_element_of_a_model_once(flats: list[FlatLayout], num_shards: int, granularity: int) -> None:
    model = ModelLayout(tuple(flats), ())
    shards = [ShardLayout(model, k, num_shards, granularity) for k in range(num_shards)]
    owners = torch.zeros(model.size, dtype=torch.int32)
    for shard in shards:
        state = torch.zeros(shard.size, dtype=torch.int32)
        for layer, span in enumerate(shard.spans):
            state[shard.slice(layer)] += 1
            owners[model.starts[layer] + span.start : model.starts[layer] + span.stop] += 1
        assert (state == 1).all()
    assert (owners == 1).all()
    assert all(start % CUT_ELEMENTS == 0 for start in model.starts)


@given(layers(mixed=True), st.integers(1, 6))
def test_wide_copies_are_divided_as_their_parameters(layout: FlatLayout, count: int) -> None:
    """Each FP32 value is read from two elements that nothing else has, and the owner of a value has its wide copy."""
    values = torch.zeros(layout.size, dtype=torch.bfloat16)
    for number, s in enumerate(layout.owned, 1):
        view = s.read_view(values)
        assert view.dtype == (torch.float32 if s.fp32 else torch.bfloat16)
        view.fill_(number)
    assert all((s.read_view(values) == number).all() for number, s in enumerate(layout.owned, 1))
    cuts = layout.cuts(layout.trained, count)
    wide = [layout.wide_of(cut) for cut in cuts]
    assert [(wide[0].start, wide[-1].stop), *((a.stop, b.start) for a, b in pairwise(wide))] == [
        tuple(layout.wide), *((span.stop, span.stop) for span in wide[:-1]),
    ]  # fmt: skip
    for cut, span in zip(cuts, wide, strict=True):
        for run in layout.runs(cut):
            if run.segment.fp32:
                first = run.segment.read_start + 2 * run.in_segment
                assert span.start <= first <= first + 2 * run.length <= span.stop
    for run in layout.runs(layout.frozen):
        assert layout.logical(ElementRange(run.padded, run.padded + run.length * run.segment.width)) == (
            run.logical, run.logical + run.length,
        )  # fmt: skip
    assert sum(run.length for part in layout.parts for run in layout.runs(part)) == layout.logical_size


def test_a_layer_of_tied_parameters_alone_is_empty() -> None:
    layout = FlatLayout.build("head", [ParameterSpec("head", "weight", (9, 8), tied_to="e")], num_fragments=3)
    assert (layout.size, layout.logical_size, layout.fragments) == (0, 0, (ElementRange(0, 0),))
    assert layout.cuts(layout.trained, 3) == 3 * (ElementRange(0, 0),)
    assert list(layout.runs(ElementRange(0, 0))) == []
