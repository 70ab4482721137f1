"""What several GPU workers share: parts of gradients, signal words, places in the slab, sums and norms."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.ranks import RankParts
from megatrain_ray.engine.gradients.gradient_store import GradientStore
from megatrain_ray.engine.host.gradient_slab import FollowerSlab
from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.host.signal_words import SlabRegion
from megatrain_ray.engine.layout.flat_layout import ElementRange, FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from tests.support.reference import MuonRecipe, Recipe
from tests.support.run_engine import Mode, folder_source, plan_for
from tests.support.shards import header
from tests.support.tiny import build_tiny

T = TypeVar("T")

NAMES = ("a", "b", "c")


def layout(*sizes: int) -> ModelLayout:
    specs = [ParameterSpec(name, name, (size,)) for name, size in zip(NAMES, sizes, strict=False)]
    return ModelLayout((FlatLayout.build("layer", specs),), NAMES[: len(sizes)])


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, table: dict[int, torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._table, self._barrier = table, barrier

    def sum_part(self, flat: torch.Tensor, part: ElementRange) -> None:
        """Sum over ranks. The parts are the whole, or lie in the order of ranks, as a reduce-scatter has them."""
        spans = [ElementRange(*map(int, span)) for span in self._all(torch.tensor(part))]
        is_whole = all(span == (0, flat.numel()) for span in spans)
        assert is_whole or [0, *(s.stop for s in spans)] == [*(s.start for s in spans), flat.numel()]
        total = torch.stack(self._all(flat)).sum(0)
        flat.fill_(torch.nan)
        flat[part.start : part.stop] = total[part.start : part.stop]

    def sum(self, values: torch.Tensor) -> None:
        values.copy_(torch.stack(self._all(values)).sum(0))

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(values))

    def _all(self, values: torch.Tensor) -> list[torch.Tensor]:
        self._table[self.rank] = values.clone()
        self._barrier.wait(10)
        found = [self._table[rank] for rank in range(self.size)]
        self._barrier.wait(10)
        return found


def on_ranks(size: int, work: Callable[[Threads], T]) -> list[T]:
    table, barrier = dict[int, torch.Tensor](), threading.Barrier(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, [Threads(rank, size, table, barrier) for rank in range(size)]))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_parts_of_all_ranks_cover_what_is_trained(size: int) -> None:
    model = layout(5000, 64, 300)
    spans = [RankParts(model, rank, size).gradient_span(0) for rank in range(size)]
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == model.layers[0].trained.size
    assert all(span.start % 64 == 0 for span in spans)
    if size in (2, 4):
        assert len({span.size for span in spans}) == 1, "a reduce-scatter wants equal parts"
    flat = torch.arange(model.layers[0].trained.size)
    views = [RankParts(model, rank, size).views(0, flat) for rank in range(size)]
    for name in NAMES:
        whole = torch.cat([part[name].flatten() for part in views if name in part])
        assert torch.equal(whole, model.layers[0].view(flat, name))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("on_device", "muon"), [(False, None), (True, None), (False, MuonRecipe())])
def test_each_rank_keeps_its_part_of_a_sum_and_all_have_the_same_norms(
    tmp_path: Path, size: int, muon: MuonRecipe | None, *, on_device: bool
) -> None:
    """Each rank keeps all of a layer that lives on the devices, and whole matrices of one that Muon trains."""
    source = folder_source(build_tiny(tmp_path, num_layers=1))
    mode = Mode(hbm_layers=frozenset(range(3) if on_device else ()))
    structure, plan = plan_for(source.factory, Recipe(1, micro_batch_size=2, muon=muon), mode, (4, 32))
    model = structure.layout()
    gradients = [[random_gradients(model, layer, rank) for layer in range(3)] for rank in range(size)]

    def work(rank: Threads) -> tuple[list[torch.Tensor], float, dict[str, float]]:
        device = CpuDevice()
        try:
            store = GradientStore(plan, model, device, rank, poison=True)
            store.begin()
            kept = []
            for layer in (2, 1, 0):
                store.add(layer, gradients[rank.rank][layer], last=True)
                departure = store.finalize(layer)
                flat = store.pop_deferred(layer) if departure is None else departure.flat
                kept.append(flat.clone())
                if departure:
                    departure.done.set_result(device.record())
            return kept[::-1], float(store.total_norm()), {name: float(norm) for name, norm in store.norms.items()}
        finally:
            device.close()

    found = on_ranks(size, work)
    squares = 0.0
    for layer, flat in enumerate(model.layers):
        spans = [RankParts(model, rank, size).gradient_span(layer) for rank in range(size)]
        parts = [found[rank][0][layer] for rank in sorted(range(size), key=spans.__getitem__)]
        whole = parts[0] if on_device else torch.cat(parts)
        for name in (segment.name for segment in flat.trained_segments):
            total = torch.stack([of_rank[layer][name] for of_rank in gradients]).sum(0)
            assert torch.equal(flat.view(whole, name), total)
            assert found[0][2][name] == pytest.approx(float(total.norm()), rel=1e-6)
            squares += float(total.double().square().sum())
    assert found[0][1] == pytest.approx(squares**0.5, rel=1e-6)
    assert all(of_rank[1:] == found[0][1:] for of_rank in found), "the same bits on every rank"


def random_gradients(model: ModelLayout, layer: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * layer + rank)
    return {s.name: torch.randn(s.shape, generator=generator) for s in model.layers[layer].trained_segments}


def words_of(num_ranks: int) -> SharedUpdateState:
    words = SharedUpdateState(
        memoryview(mmap.mmap(-1, 8 * SharedUpdateState.num_words(2, 1, num_ranks))), 2, 1, num_ranks
    )
    words.reset(4, [{0, 1}])
    return words


def test_a_gradient_has_landed_when_all_ranks_have_landed_their_parts() -> None:
    words = words_of(3)
    words.updates.commit(header(5))
    words.gradients.land(0, 5, 4096, rank=1)
    words.gradients.land(0, 5, 0, rank=2)
    assert not words.gradients.has_landed(0, 5)
    assert not words.gradients.wait_landed(0, 5, 0.0, committed=True)
    words.gradients.land(0, 5, 8192)
    assert words.gradients.wait_landed(0, 5, 0.0, committed=True)
    assert words.gradients.start(SlabRegion.GRADIENT, 0) == 8192, "the first rank's word"
    assert not words.gradients.has_landed(1, 5)


def test_what_part_of_the_ranks_has_landed_is_withdrawn() -> None:
    words = words_of(2)
    words.gradients.place(SlabRegion.GRADIENT, 0, 5, 128)
    words.gradients.place(SlabRegion.DIRECTIONS, 0, 5, 256)
    words.gradients.land(0, 5, 128, rank=1)
    words.gradients.withdraw(4)
    assert (
        words.gradients.placed_at(SlabRegion.GRADIENT, 0, 5)
        is words.gradients.placed_at(SlabRegion.DIRECTIONS, 0, 5)
        is None
    )
    words.gradients.land(0, 5, 128)
    assert not words.gradients.has_landed(0, 5), "the other one's is to come again"


async def test_a_rank_leases_where_the_first_one_does() -> None:
    words = words_of(2)
    slab = FollowerSlab(
        torch.arange(256, dtype=torch.uint8), [64, 32], partial(words.gradients.placed_at, SlabRegion.GRADIENT)
    )
    leasing = asyncio.create_task(slab.lease(1, 5))
    await asyncio.sleep(0)
    words.gradients.place(SlabRegion.GRADIENT, 1, 5, 128)
    await asyncio.sleep(0)
    assert not leasing.done(), "it looks when it is woken"
    await slab.wake()
    lease = await leasing
    assert (lease.layer, lease.start_bytes) == (1, 128)
    assert torch.equal(lease.region, torch.arange(128, 160, dtype=torch.uint8))


def test_directions_have_a_place_of_their_own() -> None:
    words = words_of(2)
    words.gradients.place(SlabRegion.GRADIENT, 1, 5, 128)
    assert words.gradients.placed_at(SlabRegion.DIRECTIONS, 1, 5) is None
    words.gradients.place(SlabRegion.DIRECTIONS, 1, 5, 192)
    assert (
        words.gradients.placed_at(SlabRegion.GRADIENT, 1, 5),
        words.gradients.placed_at(SlabRegion.DIRECTIONS, 1, 5),
    ) == (
        128,
        192,
    )
    assert (
        words.gradients.placed_at(SlabRegion.DIRECTIONS, 0, 5)
        is words.gradients.placed_at(SlabRegion.DIRECTIONS, 1, 6)
        is None
    )
