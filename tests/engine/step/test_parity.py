"""Parity with the reference over three steps: the promise of the product, over every way a step can run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakSet

import pytest
import torch

from megatrain_ray.engine.gradients.gradient_store import GradientStore
from megatrain_ray.engine.layer_calls.layer_call import LayerCall
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.plan_groups import UpdateOrder
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.memory.spill_bytes import room_in_slots
from megatrain_ray.io.storage.packed_store import Packer
from megatrain_ray.virtual_clock import Stage
from tests.support.reference import Recipe, Result, train_reference
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

# `make test-all` runs the products.
pytestmark = pytest.mark.pairwise

Gradients = Mapping[str, torch.Tensor | None]

STEPS = 3  # the first with no moments, one with them, and one after that
KEEP, RECOMPUTE = ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE
OUTER = LoopOrder.MICRO_BATCHES_OUTER
LAYERS = LoopOrder.LAYERS_OUTER


def run(
    folder: Path, recipe: Recipe, mode: Mode, *, tied: bool = False, steps: int = STEPS, **shape: Any
) -> tuple[EngineResult, Result]:
    build_tiny(folder, tied=tied, **shape)
    return train_engine(folder, tiny_batches(steps), recipe, mode), reference(recipe, steps, tied=tied, **shape)


@cache
def reference(recipe: Recipe, steps: int, **shape: Any) -> Result:
    """Return what plain PyTorch gets, once for all modes of the engine."""
    with TemporaryDirectory() as folder:
        return train_reference(build_tiny(Path(folder), **shape), tiny_batches(steps), recipe)


def assert_equal(ours: EngineResult, theirs: Result) -> None:
    """Bit-equal losses, norms, masters and moments."""
    assert ours.losses == theirs.losses
    assert ours.grad_norms == theirs.grad_norms
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name
        assert torch.equal(ours.exp_avg[name], theirs.exp_avg[name]), name
    assert ours.exp_avg_sq.keys() == theirs.exp_avg_sq.keys()
    for name, v in theirs.exp_avg_sq.items():
        assert torch.equal(ours.exp_avg_sq[name], v), name


def assert_mode_ran(result: EngineResult, recipe: Recipe, mode: Mode) -> None:
    """Plan and event log show what the test says it tested."""
    plan, records = result.plan, result.records[0]
    names = [r.op.name for r in records if r.stage is Stage.COMPUTE]
    blocks = [layer for layer in plan.layers if layer.name.startswith("layers")]
    m = plan.step.num_micro_batches
    assert {layer.activations for layer in blocks} == {mode.activations}
    assert names.count("recompute") == (len(blocks) * m if mode.activations is RECOMPUTE else 0)
    assert plan.shards.num_shards == mode.num_shards
    assert {layer.num_fragments for layer in blocks} == {mode.num_fragments}
    forwards = [r.op.micro_batch for r in records if r.op.name == "forward" and r.op.layer == 1]
    second = [r.op.micro_batch for r in records if r.op.name == "forward" and r.op.layer == 2]
    everything = [r.op for r in records if r.op.name == "forward" and r.op.layer in (1, 2)]
    assert forwards == second == list(range(m))
    interleaved = [op.layer for op in everything] == [1] * m + [2] * m
    assert interleaved is (mode.order is LAYERS or m == 1)
    assert plan.step.update_order is (UpdateOrder.BACKWARD if recipe.clip is None else UpdateOrder.FORWARD)


MODES = [
    pytest.param(Mode(order, activations, shards, fragments), m, id=f"{order.value}-{activations.value}-{shards}s-{m}m")
    for (order, activations), (shards, fragments, m) in itertools.product(
        itertools.product(LoopOrder, ActivationPolicy), [(1, 1, 1), (2, 3, 4), (3, 1, 4)]
    )
]


@pytest.mark.parametrize(("mode", "num_micro_batches"), MODES)
def test_fp32_is_bit_equal(tmp_path: Path, mode: Mode, num_micro_batches: int) -> None:
    recipe = Recipe(STEPS, micro_batch_size=4 // num_micro_batches, clip=1.0)
    ours, theirs = run(tmp_path, recipe, mode)
    assert_mode_ran(ours, recipe, mode)
    assert max(theirs.grad_norms) > 1.0, "clipping must bite in this test"
    assert_equal(ours, theirs)


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("activations", ActivationPolicy)
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_boundaries_on_the_host_are_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: LoopOrder, activations: ActivationPolicy,
    micro_batch_size: int,
) -> None:  # fmt: skip
    """In a forward each input makes way for what is made of it, beside two more.

    In a backward of a block the device has the input that it reads and the next one. The simulated link still holds one
    that it has copied. Blocks share the one region for the gradients of embedding and head, which are larger.
    """
    recipe = Recipe(STEPS, micro_batch_size=micro_batch_size)
    mode = Mode(order, activations, num_shards=2, num_edge_slots=1, boundaries=Tier.HOST)
    calls, most = WeakSet[LayerCall](), Counter[str]()

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watch(call: LayerCall, *args: Any, **kwargs: Any) -> Any:
            result = function(call, *args, **kwargs)
            calls.add(call)
            held = [call.output_storage(0) for call in calls if call._outputs]
            if ".layers." in call.path:
                most[name] = max(most[name], sum(bool(storage and storage.nbytes()) for storage in held))
            return result

        return watch

    for name in ("forward", "backward"):
        monkeypatch.setattr(LayerCall, name, watched(name, getattr(LayerCall, name)))
    ours, theirs = run(tmp_path, recipe, mode, vocab_size=1024)
    assert_mode_ran(ours, recipe, mode)
    assert (most["forward"], most["backward"] <= 3) == (ours.plan.step.num_live_micro_batches + 2, True)
    assert_equal(ours, theirs)
    blocks = range(1, len(ours.plan.layers) - 1)
    expected = [(layer, j) for layer in blocks for j in range(4 // micro_batch_size)]
    for stage in (Stage.D2H, Stage.H2D):
        moved = [r.op for r in ours.records[-1] if r.op.name == "boundary" and r.stage is stage]
        assert sorted((op.layer, op.micro_batch) for op in moved) == expected, stage


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("activations", ActivationPolicy)
@pytest.mark.parametrize("boundaries", [Tier.HBM, Tier.HOST])
@pytest.mark.parametrize("segment", [2, 8])
def test_boundaries_that_are_computed_again_are_bit_equal(
    tmp_path: Path, order: LoopOrder, activations: ActivationPolicy, boundaries: Tier, segment: int
) -> None:
    """Every layer that another one of its segment follows runs its forward twice."""
    recipe = Recipe(STEPS, micro_batch_size=2)
    mode = Mode(order, activations, num_shards=2, boundaries=boundaries, segment=segment)
    ours, theirs = run(tmp_path, recipe, mode)
    assert_mode_ran(ours, recipe, mode)
    assert_equal(ours, theirs)
    blocks = range(1, len(ours.plan.layers) - 1)
    twice = [layer for layer in blocks[:-1] if layer % segment]
    assert sorted(ours.plan.replayed_layers) == twice
    assert sorted(r.op.layer for r in ours.records[-1] if r.op.name == "replay") == sorted([*twice, *twice])


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize(
    ("precision", "dropout", "mode"),
    [
        pytest.param("fp32", 0.0, Mode(boundaries=Tier.HOST), id="fp32, with boundaries"),
        pytest.param("bf16", 0.0, Mode(hbm_layers=frozenset({0, 2})), id="bf16, layers in HBM"),
        pytest.param("fp32", 0.1, Mode(segment=2, num_fragments=3), id="fp32, dropout, segments"),
        pytest.param("bf16", 0.1, Mode(boundaries=Tier.HOST, segment=3), id="bf16, dropout, segments with boundaries"),
    ],
)
def test_what_is_kept_on_the_host_is_bit_equal(
    tmp_path: Path, order: LoopOrder, micro_batch_size: int, precision: str, dropout: float, mode: Mode
) -> None:
    """All blocks but the last one keep as much there as the plan says, except for small storages."""
    recipe = Recipe(3, micro_batch_size=micro_batch_size, precision=precision)
    mode = replace(mode, order=order, num_shards=2, kept=Tier.HOST, num_staying=1)
    ours, theirs = run(tmp_path, recipe, mode, attention_dropout=dropout, steps=3)
    assert_equal(ours, theirs)
    blocks = [i for i, layer in enumerate(ours.plan.layers) if layer.kept is Tier.HOST]
    assert blocks == [1, 2]
    planned = sum(layer.kept_bytes for layer in ours.plan.layers)
    assert ours.plan.host_kept_bytes == planned * ours.plan.step.num_live_micro_batches
    for stage in (Stage.D2H, Stage.H2D):
        moved = [r.op for r in ours.records[-1] if r.op.name == "kept" and r.stage is stage]
        expected = [(layer, j) for layer in blocks for j in range(4 // micro_batch_size)]
        assert sorted((op.layer, op.micro_batch) for op in moved) == expected, stage
        per_micro_batch = sum(op.num_bytes for op in moved) / ours.plan.step.num_micro_batches
        assert 0.9 * planned < per_micro_batch <= planned


EVERY = frozenset(range(5))


@pytest.mark.spread(5)  # each of them once
@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize(
    ("precision", "mode"),
    [
        pytest.param("fp32", Mode(boundaries=Tier.HOST, to_disk=EVERY), id="fp32, boundaries"),
        pytest.param("bf16", Mode(kept=Tier.HOST, num_staying=1, to_disk=frozenset({1})), id="bf16, some kept"),
        pytest.param(
            "bf16",
            Mode(boundaries=Tier.HOST, kept=Tier.HOST, to_disk=EVERY, stored=EVERY, spilled=EVERY),
            id="all",
        ),
        pytest.param(
            "fp32",
            Mode(boundaries=Tier.HOST, kept=Tier.HOST, segment=3, to_disk=EVERY, num_windows=1),
            id="segments",
        ),
        pytest.param("fp32", Mode(boundaries=Tier.HOST, to_disk=EVERY, window_bytes=1 << 20), id="large windows"),
    ],
)
def test_activations_on_disk_are_bit_equal(
    tmp_path: Path, order: LoopOrder, micro_batch_size: int, precision: str, mode: Mode
) -> None:
    """They pass through windows that are smaller than what one layer leaves; each is written and read once a step."""
    recipe = Recipe(3, micro_batch_size=micro_batch_size, precision=precision)
    mode = replace(mode, order=order, num_shards=2)
    ours, theirs = run(tmp_path, recipe, mode, steps=3)
    assert_equal(ours, theirs)
    plan, kinds = ours.plan, ("boundary", "kept")
    assert {i for i, layer in enumerate(plan.layers) if layer.disk_activations} == mode.to_disk & {1, 2, 3}
    left = [r.op for r in ours.records[-1] if r.op.name in kinds and r.stage is Stage.D2H]
    on_disk = sum(op.num_bytes for op in left if op.layer in mode.to_disk)
    assert 0.9 * sum(plan.disk_activations) < on_disk / plan.step.num_sweeps <= sum(plan.disk_activations)
    moved = sum(r.op.num_bytes for r in ours.records[-1] if r.op.name in kinds and r.stage is Stage.DISK)
    assert moved == 2 * on_disk


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("activations", ActivationPolicy)
@pytest.mark.parametrize("chunk", [None, 16])
def test_tied_weights_are_bit_equal(
    tmp_path: Path, order: LoopOrder, activations: ActivationPolicy, chunk: int | None
) -> None:
    recipe = Recipe(STEPS, loss_chunk_tokens=chunk)
    mode = Mode(order, activations, num_shards=2)
    ours, theirs = run(tmp_path, recipe, mode, tied=True)
    assert_mode_ran(ours, recipe, mode)
    assert "lm_head.weight" not in ours.masters
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    ("mode", "micro_batch_size"),
    [(Mode(), 1), (Mode(), 4), (Mode(LAYERS), 1), (Mode(sums=Tier.HOST), 1)],
    ids=["outer", "one micro-batch", "layers outer", "sums on the host"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_chunks_of_a_head_of_its_own_are_bit_equal(
    tmp_path: Path, precision: str, micro_batch_size: int, mode: Mode
) -> None:
    """With several micro-batches, each chunk's gradient is added to their sum.

    With one, chunks have a sum of their own.
    """
    recipe = Recipe(STEPS, precision=precision, micro_batch_size=micro_batch_size, loss_chunk_tokens=24)
    ours, theirs = run(tmp_path, recipe, mode)
    assert ours.plan.compute.chunks_add_to_sums is (micro_batch_size == 1)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("activations", ActivationPolicy)
def test_dropout_is_bit_equal(tmp_path: Path, order: LoopOrder, activations: ActivationPolicy) -> None:
    recipe, mode = Recipe(STEPS, seed=3), Mode(order, activations)
    ours, theirs = run(tmp_path / "dropout", recipe, mode, attention_dropout=0.1)
    assert_equal(ours, theirs)
    without = train_reference(build_tiny(tmp_path / "none"), tiny_batches(STEPS), recipe)
    assert without.losses != theirs.losses


@pytest.mark.parametrize(("clip", "num_updated_late"), [(None, 0), (None, 3), (1e6, 0)])
def test_without_clipping_is_bit_equal(tmp_path: Path, clip: float | None, num_updated_late: int) -> None:
    """`null` turns it off, updates start in backward; a large bound does not bite and must change nothing."""
    recipe = Recipe(STEPS, clip=clip)
    mode = Mode(LAYERS, KEEP, num_shards=2, num_updated_late=num_updated_late)
    ours, theirs = run(tmp_path, recipe, mode)
    assert_mode_ran(ours, recipe, mode)
    assert_equal(ours, theirs)
    updates = [r for records in ours.records for r in records if r.op.name == "update"]
    order = list(dict.fromkeys(r.op.layer for r in sorted(updates, key=lambda record: record.start_s)))
    expected = [4, 3, 0, 1, 2] if num_updated_late else [4, 3, 2, 1, 0]
    assert order == ([0, 1, 2, 3, 4] if clip else expected)


@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("order", LoopOrder)
def test_bf16_is_bit_equal_on_cpu(
    tmp_path: Path, grad_dtype: str, num_micro_batches: int, tied: bool, order: LoopOrder
) -> None:
    """Stronger than the stated tolerance: BF16 kernels of one CPU round one way."""
    recipe = Recipe(STEPS, precision="bf16", grad_dtype=grad_dtype, micro_batch_size=4 // num_micro_batches)
    ours, theirs = run(tmp_path, recipe, Mode(order, RECOMPUTE, num_shards=3), tied=tied)
    in_float32 = num_micro_batches == 4 and grad_dtype == "fp32"
    assert ours.plan.gradients.offload_dtype is (torch.float32 if in_float32 else torch.bfloat16)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_sums_that_wait_on_the_host_are_bit_equal(tmp_path: Path, grad_dtype: str, clip: float | None) -> None:
    """Micro-batches outermost where not even the sums fit the device: they leave and come back for each of them."""
    recipe = Recipe(STEPS, precision="bf16", grad_dtype=grad_dtype, clip=clip)
    mode = Mode(OUTER, RECOMPUTE, num_shards=2, sums=Tier.HOST)
    ours, theirs = run(tmp_path, recipe, mode, tied=True)
    assert_mode_ran(ours, recipe, mode)
    ops = [r.op.name for r in ours.records[0]]
    assert (ops.count("offload"), ops.count("fetch")) == (5 * 4, 5 * 3)
    assert len(ours.plan.slots.gradient_bytes) == 3
    assert_equal(ours, theirs)


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("spilled", [{1, 2, 3}, {0, 1, 2, 3, 4}], ids=["blocks", "all"])
def test_state_that_spills_is_bit_equal(
    tmp_path: Path, order: LoopOrder, clip: float | None, spilled: set[int]
) -> None:
    """Every state is read and written once a step, in several parts.

    When the last step ends, as much has been read again as slots have room for.
    """
    recipe = Recipe(STEPS, precision="bf16", clip=clip)
    mode = Mode(order, num_shards=2, spilled=frozenset(spilled))
    ours, theirs = run(tmp_path, recipe, mode, tied=True)
    assert_mode_ran(ours, recipe, mode)
    layers, precision = ours.layout.layers, ours.plan.precision
    state = sum(layers[i].trained.size for i in spilled) * precision.state_bytes
    assert state > 2 * room_in_slots(ours.plan, ours.layout)
    ahead = room_in_slots(ours.plan, ours.layout)
    assert (ours.moved("write"), ours.moved("read")) == (STEPS * state, STEPS * state + ahead)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_what_is_packed_on_disk_is_bit_equal(
    tmp_path: Path, precision: str, grad_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = frozenset(range(5))
    lengths: dict[int, set[int]] = {}
    real_pack = Packer.pack

    def pack(self: Packer, block: memoryview, itemsize: int) -> memoryview:
        packed = real_pack(self, block, itemsize)
        lengths.setdefault(itemsize, set()).add(len(block) - len(packed))
        return packed

    monkeypatch.setattr(Packer, "pack", pack)
    recipe = Recipe(STEPS, precision=precision, grad_dtype=grad_dtype)
    blocks = frozenset({1, 2, 3})
    mode = Mode(num_shards=2, stored=everything, spilled=everything, on_disk=blocks, packed=True)
    ours, theirs = run(tmp_path, recipe, mode, tied=True)
    assert_mode_ran(ours, recipe, mode)
    assert ours.plan.disk.packed and ours.plan.weights_on_disk == blocks
    assert set(lengths) == {4, ours.plan.gradients.offload_dtype.itemsize, ours.plan.precision.working_dtype.itemsize}
    assert all(max(saved) > 0 for saved in lengths.values())
    assert_equal(ours, theirs)


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stored", "spilled"),
    [({1, 2, 3}, set()), ({0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}), ({2, 3, 4}, {3}), ({3}, {1, 2})],
    ids=["gradients", "all", "less state", "elsewhere"],
)
def test_gradients_that_wait_on_disk_are_bit_equal(
    tmp_path: Path, order: LoopOrder, grad_dtype: str, stored: set[int], spilled: set[int]
) -> None:
    """Each gradient is written and read once a step, through the slots of the state, some of which is on disk too.

    The slab has room for one such gradient at a time, beside those that stay.
    """
    recipe = Recipe(STEPS, precision="bf16", grad_dtype=grad_dtype)
    mode = Mode(order, num_shards=2, stored=frozenset(stored), spilled=frozenset(spilled))
    ours, theirs = run(tmp_path, recipe, mode, tied=True)
    assert_mode_ran(ours, recipe, mode)
    sizes, plan = ours.layout.trained_sizes, ours.plan
    assert set(plan.gradients_on_disk) == stored
    gradients = sum(sizes[i] for i in stored) * plan.gradients.offload_dtype.itemsize
    state = sum(sizes[i] for i in spilled) * plan.precision.state_bytes
    assert (ours.moved("store"), ours.moved("write")) == (STEPS * gradients, STEPS * state)
    assert ours.moved("read") == STEPS * (gradients + state)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("hbm_layers", [set(), {0, 1}], ids=["none on the device", "two on the device"])
def test_gradients_that_wait_in_all_places_are_bit_equal(
    tmp_path: Path, order: LoopOrder, num_micro_batches: int, hbm_layers: set[int]
) -> None:
    """Gradients wait on the device, in the slab, and on disk."""
    recipe = Recipe(STEPS, precision="bf16", micro_batch_size=4 // num_micro_batches)
    mode = Mode(
        order, num_shards=2, num_waiting=1, stored=frozenset({4, 5}), spilled=frozenset({5}),
        hbm_layers=frozenset(hbm_layers), segment=2,
    )  # fmt: skip
    ours, theirs = run(tmp_path, recipe, mode, num_layers=5)
    assert_mode_ran(ours, recipe, mode)
    tiers = [layer.gradients for layer in ours.plan.layers]
    assert tiers == [
        *[Tier.HBM] * (1 + len(hbm_layers)),
        *[Tier.HOST] * (3 - len(hbm_layers)),
        Tier.NVME,
        Tier.NVME,
        Tier.HOST,
    ]
    assert_equal(ours, theirs)


def test_chunked_loss_with_several_chunks_is_bit_equal(tmp_path: Path) -> None:
    recipe = Recipe(STEPS, precision="bf16", loss_chunk_tokens=24, micro_batch_size=2)
    ours, theirs = run(tmp_path, recipe, Mode(LAYERS, KEEP))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_wrong_gradient_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """The comparison finds one element of one parameter in one micro-batch of one step that is off by 16 ulps.

    On some processors, one ulp would be rounded away in the sum or in a product. The first moment keeps the error. An
    FP32 master need not, because its own ulp is larger than what this moves it by.
    """
    recipe, mode = Recipe(2, precision=precision), Mode(num_shards=2)
    assert_equal(*run(tmp_path, recipe, mode, steps=2))
    name = "model.layers.1.self_attn.o_proj.weight"
    add, calls = GradientStore.add, itertools.count()

    def add_ulps(store: GradientStore, layer: int, gradients: Gradients, *, last: bool) -> None:
        if layer == 2 and next(calls) == 0:
            gradients = ulps_up(gradients, name)
        add(store, layer, gradients, last=last)

    monkeypatch.setattr(GradientStore, "add", add_ulps)
    ours, theirs = run(tmp_path, recipe, mode, steps=2)
    assert next(calls) == 2 * 4, "both steps had all their micro-batches"
    assert ours.losses[0] == theirs.losses[0], "the first loss is older than the first gradient"
    with pytest.raises(AssertionError):
        assert_equal(ours, theirs)
    assert not torch.equal(ours.exp_avg[name], theirs.exp_avg[name])


def ulps_up(gradients: Gradients, name: str) -> Gradients:
    """Return the same gradients, with the largest element of `name` moved by 16 ulps."""
    gradient = gradients[name]
    assert gradient is not None
    moved = gradient.clone()
    largest = moved.view(-1)[moved.abs().argmax()]
    for _ in range(16):
        largest.copy_(torch.nextafter(largest, torch.full_like(largest, torch.inf).copysign(largest)))
    assert int((moved != gradient).sum()) == 1
    return {**gradients, name: moved}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(Recipe(2, loss_chunk_tokens=16), Recipe(2), id="chunks"),
        pytest.param(Recipe(2, seed=3), Recipe(2, seed=4), id="dropout seed"),
        pytest.param(Recipe(2, micro_batch_size=2), Recipe(2), id="micro-batches"),
    ],
)
def test_another_recipe_would_be_seen(tmp_path: Path, ours: Recipe, theirs: Recipe) -> None:
    build_tiny(tmp_path, attention_dropout=0.1)
    batches = tiny_batches(2)
    result = train_engine(tmp_path, batches, ours, Mode())
    assert_equal(result, train_reference(tmp_path, batches, ours))
    with pytest.raises(AssertionError):
        assert_equal(result, train_reference(tmp_path, batches, theirs))


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize(
    ("precision", "clip", "num_fragments", "on_disk"),
    [("bf16", 1.0, 1, {2, 3}), ("bf16", None, 1, {1, 2, 3}), ("fp32", 1.0, 3, {1, 3})],
    ids=["clipped", "unclipped", "fp32, fragments"],
)
def test_weights_on_disk_are_bit_equal(
    tmp_path: Path, order: LoopOrder, num_shards: int, precision: str, clip: float | None, num_fragments: int,
    on_disk: set[int],
) -> None:  # fmt: skip
    """Weights come from the shards' files for every load, once what the update made of them is there.

    For every update they come with the state.
    """
    recipe = Recipe(STEPS, precision=precision, clip=clip)
    stored = {2, 3} if clip else set[int]()
    mode = Mode(
        order, num_shards=num_shards, num_fragments=num_fragments,
        spilled=frozenset({1, 2, 3}), stored=frozenset(stored), on_disk=frozenset(on_disk),
    )  # fmt: skip
    ours, theirs = run(tmp_path, recipe, mode)
    assert_mode_ran(ours, recipe, mode)
    assert ours.plan.weights_on_disk == on_disk
    loads = [r.op for records in ours.records for r in records if r.op.name == "load" and r.op.layer in on_disk]
    reads = [r.op for records in ours.records for r in records if r.stage is Stage.WEIGHTS]
    assert [(op.layer, op.fragment) for op in reads] == [(op.layer, op.fragment) for op in loads]
    assert_equal(ours, theirs)
