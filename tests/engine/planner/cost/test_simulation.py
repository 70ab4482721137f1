"""The simulated schedule takes as long as the engine does on the virtual clock, whatever the operations cost."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain_ray.engine.activations import activation_store
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.residency import residency_of
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.cost.simulate_step import SimulatedStep, Simulation
from megatrain_ray.virtual_clock import CostModel, Op, Record, Stage
from tests.support.reference import MuonRecipe, Recipe
from tests.support.run_engine import EngineResult, Mode, folder_source, plan_for, train_engine
from tests.support.tiny import build_tiny, tiny_batches

pytestmark = pytest.mark.pairwise

NUM_STEPS = 3
BEHIND = Stage.OPTIMIZER, Stage.DISK  # what goes on under the next step
OUTER, LAYERS = LoopOrder.MICRO_BATCHES_OUTER, LoopOrder.LAYERS_OUTER
EVERY = frozenset(range(8))
KEEP, RECOMPUTE = ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE
ON_DISK = Mode(spilled=frozenset({2, 3, 4, 5}), on_disk=frozenset({3, 4, 5}))


def costs(seed: int, **scales: float) -> CostModel:
    """Another number for every operation of every layer; `scales`: of a stage."""

    def cost(stage: Stage, op: Op) -> float:
        return scales.get(stage.name, 1.0) * random.Random(f"{seed} {stage} {op.name} {op.layer}").uniform(0.5, 2.0)

    return cost


def simulated(folder: Path, recipe: Recipe, mode: Mode, cost: CostModel) -> list[SimulatedStep]:
    structure, plan = plan_for(folder_source(folder).factory, recipe, mode, (4, 32))
    layout = structure.layout(plan.num_fragments)
    order = plan.visits(structure.without_backward)
    simulation = Simulation(plan, layout, order, residency_of(order, structure, layout, plan), cost)
    return [simulation.step() for _ in range(NUM_STEPS)]


def ends(result: EngineResult) -> list[float]:
    """Return when each step ends: all is computed, and all gradients have landed."""
    return [max(r.end_s for r in records if r.stage not in BEHIND) for records in result.records]


def at_work(records: tuple[Record, ...], stage: Stage) -> float:
    return sum(r.end_s - r.start_s for r in records if r.stage is stage)


@pytest.mark.parametrize(
    ("mode", "recipe", "slow"),
    [
        (Mode(), Recipe(NUM_STEPS, micro_batch_size=4), "OPTIMIZER"),
        (Mode(OUTER, RECOMPUTE, num_block_slots=3), Recipe(NUM_STEPS, micro_batch_size=2), "H2D"),
        (Mode(OUTER, RECOMPUTE, num_block_slots=3), Recipe(NUM_STEPS, micro_batch_size=2), "COMPUTE"),
        (Mode(LAYERS, num_fragments=3, num_edge_slots=1), Recipe(NUM_STEPS), "OPTIMIZER"),
        (Mode(LAYERS, RECOMPUTE, num_edge_slots=1), Recipe(NUM_STEPS, grad_dtype="bf16", precision="bf16"), "D2H"),
        (Mode(), Recipe(NUM_STEPS, micro_batch_size=2, clip=None), "OPTIMIZER"),
        (Mode(), Recipe(NUM_STEPS, micro_batch_size=4, clip=None), "D2H"),
        (Mode(num_updated_late=5), Recipe(NUM_STEPS, micro_batch_size=4, clip=None), "OPTIMIZER"),
        (Mode(num_updated_late=5), Recipe(NUM_STEPS, micro_batch_size=4, clip=None), "COMPUTE"),
        (Mode(LAYERS), Recipe(NUM_STEPS, freeze=("embed", r"layers\.0\.")), "H2D"),
        (Mode(segment=3, num_block_slots=3), Recipe(NUM_STEPS, micro_batch_size=2), "H2D"),
        (Mode(LAYERS, RECOMPUTE, segment=2), Recipe(NUM_STEPS), "COMPUTE"),
        (Mode(LAYERS, spilled=frozenset({2, 3, 4, 5})), Recipe(NUM_STEPS), "DISK"),
        (Mode(spilled=frozenset({2, 3, 4, 5})), Recipe(NUM_STEPS, micro_batch_size=4, clip=None), "DISK"),
        (Mode(LAYERS, stored=frozenset(range(8))), Recipe(NUM_STEPS), "DISK"),
        (Mode(stored=frozenset({3, 4, 5, 6}), spilled=frozenset({5, 6})), Recipe(NUM_STEPS), "OPTIMIZER"),
        (ON_DISK, Recipe(NUM_STEPS), "WEIGHTS"),
        (replace(ON_DISK, order=LAYERS), Recipe(NUM_STEPS), "DISK"),
        (replace(ON_DISK, num_fragments=3), Recipe(NUM_STEPS, clip=None), "WEIGHTS"),
        (replace(ON_DISK, num_block_slots=4), Recipe(NUM_STEPS, micro_batch_size=4), "COMPUTE"),
    ],
    ids=[
        "keep",
        "recompute",
        "computing",
        "layers outer",
        "rounded",
        "unclipped",
        "d2h",
        "late",
        "late, computing",
        "frozen",
        "segments",
        "segments, layers outer",
        "spilled",
        "spilled, unclipped",
        "stored",
        "stored and spilled",
        "weights",
        "weights, layers outer",
        "weights, unclipped",
        "weights, computing",
    ],
)
def test_steps_take_as_long_as_the_engines(tmp_path: Path, mode: Mode, recipe: Recipe, slow: str) -> None:
    """Embedding and head are larger than blocks. `slow`: the stage that takes four times as long as the others."""
    folder = build_tiny(tmp_path, num_layers=6, vocab_size=1024)
    cost = costs(0, **{slow: 4.0})
    result = train_engine(folder, tiny_batches(NUM_STEPS), recipe, mode, cost=cost)
    expected = simulated(folder, recipe, mode, cost)
    steps_s = [b - a for a, b in zip([0.0, *ends(result)], ends(result), strict=False)]
    assert [step.step_s for step in expected] == pytest.approx(steps_s)
    for step, records in zip(expected, result.records, strict=True):
        for stage in (Stage.COMPUTE, Stage.H2D, Stage.D2H, Stage.WEIGHTS):
            assert step.busy_s.get(stage, 0.0) == pytest.approx(at_work(records, stage))
            moved = sum(r.op.num_bytes for r in records if r.stage is stage)
            assert step.num_bytes.get(stage, 0) == moved
    of_disk = sum(at_work(records, Stage.DISK) for records in result.records)  # under which step is a matter of threads
    assert sum(step.busy_s.get(Stage.DISK, 0.0) for step in expected) == pytest.approx(of_disk)


@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_a_gradient_that_is_slow_to_leave_holds_a_backward_up(tmp_path: Path, grad_dtype: str) -> None:
    """The layer two before it needs its region; what is computed then is late, whatever moves meanwhile."""
    folder = build_tiny(tmp_path, num_layers=6)
    recipe = Recipe(NUM_STEPS, precision="bf16", grad_dtype=grad_dtype)

    def cost(stage: Stage, op: Op) -> float:
        return 40.0 if stage is Stage.D2H and op.layer == 5 else 1.0

    result = train_engine(folder, tiny_batches(NUM_STEPS), recipe, Mode(LAYERS), cost=cost)
    steps_s = [b - a for a, b in zip([0.0, *ends(result)], ends(result), strict=False)]
    expected = simulated(folder, recipe, Mode(LAYERS), cost)
    assert [step.step_s for step in expected] == pytest.approx(steps_s)
    assert expected[1].exposed_s["d2h"] > 20


@pytest.mark.parametrize(("clip", "micro_batch_size"), [(1.0, 2), (None, 2), (None, 4)])
def test_with_muon(tmp_path: Path, clip: float | None, micro_batch_size: int) -> None:
    folder = build_tiny(tmp_path, num_layers=6)
    recipe = Recipe(NUM_STEPS, micro_batch_size=micro_batch_size, clip=clip, muon=MuonRecipe())
    cost = costs(1)
    result = train_engine(folder, tiny_batches(NUM_STEPS), recipe, Mode(), cost=cost)
    steps_s = [b - a for a, b in zip([0.0, *ends(result)], ends(result), strict=False)]
    assert [step.step_s for step in simulated(folder, recipe, Mode(), cost)] == pytest.approx(steps_s, rel=0.1)


@pytest.mark.parametrize("hbm_layers", [frozenset(), frozenset({0, 1, 3})], ids=["none", "some"])
def test_sums_that_wait_on_the_host(tmp_path: Path, hbm_layers: frozenset[int]) -> None:
    """Loads and fetches share a direction: which of two comes first is a matter of threads in the engine."""
    folder = build_tiny(tmp_path, num_layers=6)
    recipe, mode, cost = Recipe(NUM_STEPS), Mode(sums=Tier.HOST, hbm_layers=hbm_layers), costs(2)
    result = train_engine(folder, tiny_batches(NUM_STEPS), recipe, mode, cost=cost)
    steps_s = [b - a for a, b in zip([0.0, *ends(result)], ends(result), strict=False)]
    assert [step.step_s for step in simulated(folder, recipe, mode, cost)] == pytest.approx(steps_s, rel=0.1)
    assert simulated(folder, recipe, mode, cost)[1].exposed_s["host_accumulation"] > 0


@pytest.mark.spread(8)
@pytest.mark.parametrize("slow", ["COMPUTE", "OPTIMIZER", "D2H", "H2D"])
@pytest.mark.parametrize(
    ("mode", "freeze"),
    [
        (Mode(LAYERS, RECOMPUTE), ()),
        (Mode(OUTER, KEEP), ()),
        (Mode(LAYERS), ("embed", r"layers\.0\.")),
        (Mode(LAYERS, segment=3), ()),
    ],
    ids=["layers outer", "outer", "frozen", "segments"],
)
def test_boundaries_that_wait_on_the_host(tmp_path: Path, mode: Mode, freeze: tuple[str, ...], slow: str) -> None:
    """Boundaries share each direction with what the event loop moves.

    In the engine, which of two transfers comes first is a matter of threads.
    """
    folder = build_tiny(tmp_path, num_layers=6)
    recipe, cost = Recipe(NUM_STEPS, micro_batch_size=2, freeze=freeze), costs(3, **{slow: 4.0})
    mode = replace(mode, boundaries=Tier.HOST)
    result = train_engine(folder, tiny_batches(NUM_STEPS), recipe, mode, cost=cost)
    steps_s = [b - a for a, b in zip([0.0, *ends(result)], ends(result), strict=False)]
    expected = simulated(folder, recipe, mode, cost)
    is_ordered = mode.segment > 1 and slow in ("COMPUTE", "D2H")  # nothing waits for which of two was first
    assert [step.step_s for step in expected] == pytest.approx(steps_s, rel=1e-6 if is_ordered else 0.1)
    for step, records in zip(expected, result.records, strict=True):
        for stage in (Stage.H2D, Stage.D2H):
            assert step.busy_s[stage] == pytest.approx(at_work(records, stage))
            assert step.num_bytes[stage] == sum(r.op.num_bytes for r in records if r.stage is stage)


@pytest.mark.spread(10)
@pytest.mark.parametrize("slow", ["COMPUTE", "OPTIMIZER", "D2H", "H2D"])
@pytest.mark.parametrize(
    ("mode", "freeze"),
    [
        (Mode(LAYERS, boundaries=Tier.HOST, hbm_layers=EVERY), ()),
        (Mode(OUTER, num_staying=2, hbm_layers=EVERY), ()),
        (Mode(LAYERS, num_staying=1, hbm_layers=EVERY), ("embed", r"layers\.0\.")),
        (Mode(LAYERS, segment=3, boundaries=Tier.HOST, hbm_layers=EVERY), ()),
        (Mode(OUTER, boundaries=Tier.HOST), ()),
    ],
    ids=["layers outer", "outer", "frozen", "segments", "streaming"],
)
def test_what_is_kept_waits_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, freeze: tuple[str, ...], slow: str
) -> None:
    """All of it, small storages too. Where nothing else moves the order is always the same; else as above."""
    monkeypatch.setattr(activation_store, "SMALL_BYTES", 1)
    folder = build_tiny(tmp_path, num_layers=6)
    recipe, cost = Recipe(NUM_STEPS, micro_batch_size=2, freeze=freeze), costs(4, **{slow: 4.0})
    mode = replace(mode, kept=Tier.HOST)
    result = train_engine(folder, tiny_batches(NUM_STEPS), recipe, mode, cost=cost)
    steps_s = [b - a for a, b in zip([0.0, *ends(result)], ends(result), strict=False)]
    expected = simulated(folder, recipe, mode, cost)
    assert [step.step_s for step in expected] == pytest.approx(steps_s, rel=1e-6 if mode.hbm_layers else 0.1)
    for step, records in zip(expected, result.records, strict=True):
        for stage in (Stage.H2D, Stage.D2H):
            assert step.busy_s[stage] == pytest.approx(at_work(records, stage))
            assert step.num_bytes[stage] == sum(r.op.num_bytes for r in records if r.stage is stage)


BOTH_ON_DISK = Mode(LAYERS, boundaries=Tier.HOST, kept=Tier.HOST, hbm_layers=EVERY, to_disk=EVERY)


@pytest.mark.spread(4)
@pytest.mark.parametrize("slow", ["COMPUTE", "D2H", "DISK"])
@pytest.mark.parametrize(
    "mode",
    [
        BOTH_ON_DISK,
        replace(BOTH_ON_DISK, order=OUTER, num_staying=2, to_disk=frozenset({1, 2, 3}), num_windows=20),
        replace(BOTH_ON_DISK, segment=3, to_disk=frozenset({2, 4}), num_windows=5),
        Mode(boundaries=Tier.HOST, to_disk=frozenset({1, 2, 3})),
    ],
    ids=["layers outer", "outer, some", "segments, some", "streaming"],
)
def test_activations_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, slow: str) -> None:
    """Where nothing else moves, the order is always the same; elsewhere it is as above."""
    monkeypatch.setattr(activation_store, "SMALL_BYTES", 1)
    folder = build_tiny(tmp_path, num_layers=6)
    recipe, cost = Recipe(NUM_STEPS, micro_batch_size=2), costs(4, **{slow: 4.0})
    result = train_engine(folder, tiny_batches(NUM_STEPS), recipe, mode, cost=cost)
    steps_s = [b - a for a, b in zip([0.0, *ends(result)], ends(result), strict=False)]
    expected = simulated(folder, recipe, mode, cost)
    assert [step.step_s for step in expected] == pytest.approx(steps_s, rel=1e-6 if mode.hbm_layers else 0.1)
    for step, records in zip(expected, result.records, strict=True):
        for stage in (Stage.H2D, Stage.D2H, Stage.DISK):
            assert step.busy_s[stage] == pytest.approx(at_work(records, stage))
            assert step.num_bytes[stage] == sum(r.op.num_bytes for r in records if r.stage is stage)


SOME_WAITING = Mode(LAYERS, num_waiting=3, stored=frozenset({6, 7}), spilled=frozenset({7}))


@pytest.mark.parametrize(
    ("mode", "slow"),
    [
        *itertools.product(
            (Mode(gradients=Tier.HBM), Mode(LAYERS, gradients=Tier.HBM)), ("COMPUTE", "OPTIMIZER", "D2H")
        ),
        (SOME_WAITING, "COMPUTE"),
        (SOME_WAITING, "DISK"),
    ],
)
def test_gradients_that_wait_on_the_device(tmp_path: Path, mode: Mode, slow: str) -> None:
    """They leave through a slab for four layers, beside the next forward, which follows the end of the compute."""
    folder = build_tiny(tmp_path, num_layers=8)
    recipe, cost = Recipe(NUM_STEPS, micro_batch_size=2), costs(0, **{slow: 4.0})
    result = train_engine(folder, tiny_batches(NUM_STEPS), recipe, mode, cost=cost)
    computed = [max(r.end_s for r in records if r.stage is Stage.COMPUTE) for records in result.records]
    steps_s = [b - a for a, b in itertools.pairwise([0.0, *computed])]
    assert [step.step_s for step in simulated(folder, recipe, mode, cost)] == pytest.approx(steps_s)


@pytest.mark.parametrize("clip", [1.0, None])
def test_weights_are_read_once_they_are_written(tmp_path: Path, clip: float | None) -> None:
    """Not when their update is over."""
    folder, cost = build_tiny(tmp_path, num_layers=6), costs(0, DISK=4.0)
    result = train_engine(folder, tiny_batches(NUM_STEPS), Recipe(NUM_STEPS, clip=clip), ON_DISK, cost=cost)
    every = [record for records in result.records for record in records]
    for layer in ON_DISK.on_disk:
        written_s = [r.end_s for r in every if (r.stage, r.op.name, r.op.layer) == (Stage.DISK, "write", layer)]
        of_update = len(written_s) // NUM_STEPS
        for step in range(1, NUM_STEPS):
            reads = [r for r in result.records[step] if (r.stage, r.op.layer) == (Stage.WEIGHTS, layer)]
            assert reads and all(read.start_s >= written_s[step * of_update - 1] for read in reads)
