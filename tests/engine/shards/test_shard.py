"""AdamShard: any number of shards is one whole-tensor torch.optim.AdamW(fused=True), bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.optimizer.undo_log import Journal
from megatrain_ray.engine.shards.adam_shard import AdamShard
from megatrain_ray.engine.shards.shard_state import LOAD_ELEMENTS
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.saves.save_writer import Piece
from tests.support.shards import (
    HYPER,
    NAN_BYTES,
    Dictionary,
    Shards,
    assert_equal,
    flat_gradients,
    headers,
    hyper_for,
    model_layout,
    open_shards,
    random_masters,
    reference,
    shard_over,
)
from tests.support.transactions import one_layer


@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_equal_whole_tensors(precision: Precision, dtype: torch.dtype, num_shards: int) -> None:
    with open_shards(precision, num_shards) as shards:
        shards.load(Dictionary(random_masters(shards.layout)))
        for header in headers(10):
            shards.update(flat_gradients(shards.layout, header.update, dtype), header)
        assert_equal(shards, reference(shards.layout, 10, dtype))


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
def test_padding_is_never_written(precision: Precision) -> None:
    with open_shards(precision, 2) as shards:
        shards.load(Dictionary(random_masters(shards.layout)))
        shards.update(flat_gradients(shards.layout, 1, torch.bfloat16), headers(1)[0])
        for index, layer in enumerate(shards.layout.layers):
            padding = torch.ones(layer.size, dtype=torch.bool)
            for segment in layer.owned:
                padding[segment.start : segment.stop] = False
            assert padding.any()
            for kind in ("working", *shards.own[0]):
                flat = shards.flat(kind, index)
                flat = flat[padding[: flat.numel()]]
                assert flat.view(torch.uint8).eq(NAN_BYTES).all(), f"{kind} of {layer.name}"


def test_a_skipped_update_changes_nothing() -> None:
    with open_shards(Precision.BF16, 2) as shards:
        shards.load(Dictionary(random_masters(shards.layout)))
        before = shards.all_bytes()
        shards.update(flat_gradients(shards.layout, 1, torch.float32), UpdateParams(1, 1, 0.1, float("nan"), skip=True))
        assert all(torch.equal(a, b) for a, b in zip(before, shards.all_bytes(), strict=True))


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize(("saved_by", "restored_by"), [(3, 1), (1, 2), (2, 3)])
def test_pieces_restore_onto_another_number_of_shards(precision: Precision, saved_by: int, restored_by: int) -> None:
    with open_shards(precision, saved_by) as old, open_shards(precision, restored_by) as new:
        old.load(Dictionary(random_masters(old.layout)))
        for header in headers(2):
            old.update(flat_gradients(old.layout, header.update, torch.bfloat16), header)
        saved: dict[tuple[str, str], list[tuple[int, int, bytes]]] = {}
        for piece in pieces_of(old):
            data = b"".join(piece.buffers)
            saved.setdefault((piece.layer, piece.kind), []).append((piece.start, piece.stop, data))
        logical = {key: join_parts(parts) for key, parts in saved.items()}
        for piece in pieces_of(new):
            whole = logical[piece.layer, piece.kind]
            itemsize = sum(buffer.nbytes for buffer in piece.buffers) // (piece.stop - piece.start)
            part = memoryview(whole)[piece.start * itemsize : piece.stop * itemsize]
            for buffer in piece.buffers:
                buffer[:] = part[: buffer.nbytes]
                part = part[buffer.nbytes :]
            assert not part
        assert_equal(new, {kind: old.values(kind) for kind in ("master", "m", "v")})


def pieces_of(shards: Shards) -> Iterator[Piece]:
    for shard in shards.shards:
        for layer in range(len(shards.layout.layers)):
            yield from shard.pieces(layer)


def join_parts(parts: list[tuple[int, int, bytes]]) -> bytes:
    """Parts must follow each other without a gap from 0 on."""
    parts.sort()
    assert parts[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    return b"".join(data for _, _, data in parts)


def test_kinds_by_precision() -> None:
    for precision, kinds in (
        (Precision.BF16, ["working", "residual", "m", "v"]),
        (Precision.TF32, ["master", "m", "v"]),
    ):
        with open_shards(precision, 1) as shards:
            assert [piece.kind for piece in shards.shards[0].pieces(1)] == [*kinds, kinds[0]]
            assert [piece.kind for piece in shards.shards[0].pieces(0)] == kinds


def test_a_shard_without_a_part_of_a_layer_has_no_pieces() -> None:
    with open_shards(Precision.BF16, 3) as shards:
        assert [bool(list(shard.pieces(2))) for shard in shards.shards] == [False, False, True]


class _Counting(Dictionary):
    def __init__(self, masters: Mapping[str, Tensor]) -> None:
        super().__init__(masters)
        self.reads: list[tuple[str, int, int]] = []

    def read(self, name: str, start: int, stop: int) -> Tensor:
        self.reads.append((name, start, stop))
        return super().read(name, start, stop)


def test_load_reads_every_element_once_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_ray.engine.shards.shard_state.LOAD_ELEMENTS", 1000)
    assert LOAD_ELEMENTS * 4 == 4 << 20
    with open_shards(Precision.BF16, 2) as shards:
        source = _Counting(random_masters(shards.layout))
        shards.load(source)
        assert max(stop - start for _, start, stop in source.reads) == 1000
        for name, want in random_masters(shards.layout).items():
            ranges = sorted((a, b) for n, a, b in source.reads if n == name)
            assert [ranges[0][0], ranges[-1][1]] == [0, want.numel()]
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        assert_equal(shards, {"master": random_masters(shards.layout)})
        assert all(t.eq(0).all() for kind in ("m", "v") for t in shards.values(kind).values())


def test_several_threads_load_what_one_does() -> None:
    with open_shards(Precision.BF16, 2) as shards:
        masters = random_masters(shards.layout)
        for shard in shards.shards:
            shard.load(Dictionary(masters), num_threads=3)
        assert_equal(shards, {"master": masters})
        assert all(t.eq(0).all() for kind in ("m", "v") for t in shards.values(kind).values())


def test_nothing_more_is_loaded_after_damage() -> None:
    with open_shards(Precision.BF16, 1) as shards:
        masters = random_masters(shards.layout)
        longest = max(masters, key=lambda name: masters[name].numel())
        masters[longest].fill_(math.nan)
        source = _Counting(masters)
        with pytest.raises(ConfigError, match=f"{longest} holds nan"):
            shards.load(source)
        assert {name for name, _, _ in source.reads} == {longest}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_damage_in_the_source_is_refused_by_name(value: float) -> None:
    with open_shards(Precision.BF16, 1) as shards:
        masters = random_masters(shards.layout)
        masters["up"][60, 3] = value
        masters["up"][61, 5] = -value
        with pytest.raises(ConfigError, match=f"up holds {value} at element {60 * masters['up'].shape[1] + 3}:"):
            shards.shards[0].load(Dictionary(masters))


def test_weights_whose_sum_overflows_are_no_damage() -> None:
    with open_shards(Precision.FP32, 1) as shards:
        masters = random_masters(shards.layout)
        masters["up"][60, 3:6] = torch.finfo(torch.float32).max
        shards.load(Dictionary(masters))
        assert_equal(shards, {"master": masters})


def test_tensors_of_the_wrong_type_or_size_are_refused() -> None:
    layout = ShardLayout(model_layout(), 0, 1)
    size, working = layout.size, torch.zeros(layout.model.size, dtype=torch.bfloat16)
    residual = {"residual": torch.zeros(size, dtype=torch.int16)}

    def build(m_size: int, residual: dict[str, Tensor]) -> None:
        m, v = torch.zeros(m_size), torch.zeros(layout.size_of("v"))
        shard_over(layout, Precision.BF16, working, {"m": m, "v": v} | residual, num_threads=1).close()

    build(size, residual)
    with pytest.raises(MegatrainError, match=f"shard 0: m must be .*{size}.* got .*{size - 1}"):
        build(size - 1, residual)
    with pytest.raises(MegatrainError, match=r"residual must be .*int16.* got None"):
        build(size, {})


def test_moments_in_bf16_want_a_seed_and_others_none() -> None:
    part = one_layer(Precision.BF16_NARROW)
    working = torch.zeros(part.working_size, dtype=torch.bfloat16)
    for precision, hyper in ((Precision.BF16_NARROW, HYPER), (Precision.BF16, hyper_for(Precision.BF16_NARROW))):
        own = {kind: torch.zeros(part.size_of(kind), dtype=dtype) for kind, dtype in precision.state_kinds}
        journal = memoryview(bytearray(Journal.num_bytes(part, precision, 1)))
        with pytest.raises(MegatrainError, match=f"moments are {precision.moments} and the seed of their rounding is"):
            AdamShard(part, precision, working=working, own=own, hyper=hyper, num_threads=1, journal=journal)
