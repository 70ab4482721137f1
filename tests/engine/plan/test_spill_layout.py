"""SpillLayout: layers in parts that an update knows nothing else beside."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_ray.engine.layout.flat_layout import ElementRange, FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.undo_log import UNIT_ELEMENTS, num_units
from megatrain_ray.engine.plan.spill_layout import GRADIENT, SLACK_ELEMENTS, SpillLayout
from megatrain_ray.io.storage.blob_store import ALIGN_BYTES
from tests.support.shards import Dictionary, model_layout, open_shards, random_masters

SIZES = st.lists(st.integers(1, 20_000), min_size=1, max_size=6)


@given(
    layers=st.lists(SIZES, min_size=1, max_size=3),
    num_shards=st.integers(1, 3),
    most=st.integers(SLACK_ELEMENTS + 1, 30_000),
)
def test_extents_cover_what_a_shard_owns(layers: list[list[int]], num_shards: int, most: int) -> None:
    flats = [
        FlatLayout.build(f"{i}", [ParameterSpec(f"{i}.{k}", f"{k}", (size,)) for k, size in enumerate(sizes)])
        for i, sizes in enumerate(layers)
    ]
    model = ModelLayout(tuple(flats), ())
    order = range(len(flats))
    for index in range(num_shards):
        part = ShardLayout(model, index, num_shards, spilled=frozenset(order))
        layout = SpillLayout.of(part, Precision.BF16, order, 2, most)
        end = block = 0
        for extent in layout.extents:
            assert (extent.start, extent.first_block) == (end, block)
            assert extent.nbytes % ALIGN_BYTES == 0
            sizes = {kind: extent.kinds[kind].size for kind, _ in Precision.BF16.state_kinds}
            assert sizes == {kind: extent.span.size * dtype.itemsize for kind, dtype in Precision.BF16.state_kinds}
            end, block = end + extent.nbytes, block + len(extent.blocks)
        assert layout.blob_bytes == end
        for layer in order:
            spans = [layout.extents[number].span for number in layout.state_of(layer)]
            assert all(extent.layer == layer for extent in map(layout.extents.__getitem__, layout.state_of(layer)))
            edges = [part.spans[layer].start, *(span.stop for span in spans)]
            assert spans == [*itertools.starmap(ElementRange, itertools.pairwise(edges))]
            assert edges[-1] == part.spans[layer].stop
            assert all(span.size <= most for span in spans)
            assert all(span.size >= most - SLACK_ELEMENTS for span in spans[:-1])
            starts = {run.padded: run.length for run in flats[layer].runs(part.spans[layer])}
            for span in spans[1:]:
                first = max(start for start in starts if start <= span.start)
                assert (span.start - first) % UNIT_ELEMENTS == 0
                assert span.start - first < starts[first]


@given(
    layers=st.lists(SIZES, min_size=1, max_size=3),
    num_shards=st.integers(1, 3),
    most=st.integers(SLACK_ELEMENTS + 1, 30_000),
    offload_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    spills=st.booleans(),
)
def test_a_gradient_comes_before_the_state_of_its_part(
    layers: list[list[int]], num_shards: int, most: int, offload_dtype: torch.dtype, spills: bool
) -> None:
    flats = [
        FlatLayout.build(f"{i}", [ParameterSpec(f"{i}.{k}", f"{k}", (size,)) for k, size in enumerate(sizes)])
        for i, sizes in enumerate(layers)
    ]
    model, order = ModelLayout(tuple(flats), ()), range(len(flats))
    for index in range(num_shards):
        part = ShardLayout(model, index, num_shards, spilled=frozenset(order if spills else ()))
        layout = SpillLayout.of(part, Precision.BF16, order, 2, most, frozenset(order), offload_dtype)
        waiting: dict[int, int] = {}  # up to which element of a layer there was a gradient
        for extent in layout.extents:
            if extent.is_gradient:
                assert extent.span.start == waiting.get(extent.layer, part.spans[extent.layer].start)
                assert extent.kinds == {GRADIENT: ElementRange(0, extent.span.size * offload_dtype.itemsize)}
                assert extent.span.size * offload_dtype.itemsize <= most * Precision.BF16.state_bytes
                waiting[extent.layer] = extent.span.stop
            else:
                assert extent.span.stop <= waiting[extent.layer]
        assert waiting == {i: span.stop for i, span in enumerate(part.spans) if span.size}
        assert bool(layout.layers) == (spills and bool(waiting))
        assert layout.stores_gradients == bool(waiting)
        numbers = [number for layer in order for number in (*layout.gradients_of(layer), *layout.state_of(layer))]
        assert sorted(numbers) == [*range(len(layout.extents))]


def test_a_roll_back_of_a_part_leaves_the_others() -> None:
    """Though the torn block comes before it."""
    with open_shards(Precision.BF16, 1) as shards:
        shards.load(Dictionary(random_masters(model_layout())))
        (shard,) = shards.shards
        part = ShardLayout(model_layout(), 0, 1, spilled=frozenset({0}))
        first, second, *_ = SpillLayout.of(part, Precision.BF16, range(3), 2, SLACK_ELEMENTS + 1).extents
        (torn,) = shard.parts(0, shard.hyper, first.span)
        block = torn.state.cut(torn.elements(ElementRange(0, 1)))
        shard._journal.save(0, ElementRange(0, 1), block, 1)
        before = block.m.clone()
        block.m.fill_(7.0)
        shard._journal.roll_back(shard.parts(0, shard.hyper, second.span), 1)
        assert block.m.eq(7.0).all()
        shard._journal.roll_back(shard.parts(0, shard.hyper, first.span), 1)
        assert block.m.equal(before)


def test_updates_of_parts_have_the_units_of_the_layer() -> None:
    """So one of two neighbours never marks, or takes back, what is the other's."""
    with open_shards(Precision.BF16, 2) as shards:
        shards.load(Dictionary(random_masters(model_layout())))
        for shard in shards.shards:
            part = ShardLayout(model_layout(), shard.layout.index, 2, spilled=frozenset({0, 1}))
            layout = SpillLayout.of(part, Precision.BF16, range(3), 2, SLACK_ELEMENTS + 1)
            for layer in (0, 1):
                whole = [unit for p in shard.parts(layer, shard.hyper) for unit in range(*p.units)]
                spans = [layout.extents[number].span for number in layout.state_of(layer)]
                parts = [p for span in spans for p in shard.parts(layer, shard.hyper, span)]
                assert [unit for p in parts for unit in range(*p.units)] == whole == [*range(len(whole))]
                assert all(p.units.size == num_units(p.length) for p in parts)
                assert len(spans) > 1
