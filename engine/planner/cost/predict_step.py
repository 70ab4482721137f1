"""Predicts what a step of a plan costs on a machine: simulates its schedule with prices (op_costs.py). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_shards import read_bytes
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.engine.plan.residency import residency_of
from megatrain_ray.engine.plan.schedule import FORWARDS_AT_ONCE, LoopOrder, Visit, forward_visits
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.layer_costs import LAUNCHES
from megatrain_ray.engine.planner.cost.op_costs import Prices
from megatrain_ray.engine.planner.cost.simulate_step import SimulatedStep, Simulation
from megatrain_ray.virtual_clock import Op, Stage

PERIODS = 3  # micro-batches that are simulated; those between the first and the last take equally long

Key = TypeVar("Key", str, Stage)
Number = TypeVar("Number", int, float)


def predict(plan: Plan, basis: CostBasis, activations: ActivationBytes) -> Prediction:
    """Predict a step of the plan in the steady state.

    activations: bytes for a micro-batch of the plan.
    """
    prices = Prices(plan, basis, activations)
    step = _with_disk(_steady(plan, basis, prices), basis)
    if basis.scores_first:
        score_s = predict_evaluation(plan, basis, activations)
        step = replace(step, step_s=step.step_s + score_s, compute_s={**step.compute_s, "score": score_s})
    tokens = plan.batch_size * plan.step.seq_len
    flops = sum(layer.flops(tokens, tokens * plan.step.seq_len) for layer in basis.work)
    busy_s = {stage.value: seconds for stage, seconds in step.busy_s.items()}
    together_s = {**busy_s, Stage.DISK.value: _disk_s(step, basis)}
    together_s.pop(Stage.WEIGHTS.value, None)
    return Prediction(
        rates=str(basis.profile.machine),
        is_measured=basis.is_measured,
        step_s=step.step_s,
        model_tflops=flops / step.step_s / 1e12,
        compute_s=step.compute_s,
        exposed_s=step.exposed_s,
        busy_s=busy_s,
        bottleneck=max(together_s, key=lambda stage: together_s[stage]),
        h2d_bytes=step.num_bytes.get(Stage.H2D, 0),
        d2h_bytes=step.num_bytes.get(Stage.D2H, 0),
        profile=basis.rates,
        beside_copies=prices.layers.beside_copies,
    )


def predict_evaluation(plan: Plan, basis: CostBasis, activations: ActivationBytes) -> float:
    """Predict the seconds of a batch's log-probabilities: of computing, uploads or reads from disk, what takes longest.

    activations: bytes for a micro-batch of the plan.
    """
    prices, count, head = Prices(plan, basis, activations), plan.step.num_micro_batches, len(plan.layers) - 1
    forward_s = sum(prices.layers.of_layer("forward", layer) for layer in range(head + 1))
    order = forward_visits(len(plan.layers), count, plan.step.order)
    return max(count * (forward_s + prices.layers.of_layer("score", head)), _loading_s(plan, basis, prices, order))


def predict_token(plan: Plan, basis: CostBasis, activations: ActivationBytes) -> float:
    """Predict the seconds of one token of all completions that are sampled together, after their prompts.

    It is the time of loads, of reading all weights in device memory, or of launches, whatever is the longest.

    activations: bytes for a micro-batch of the plan.
    """
    prices, order = Prices(plan, basis, activations), LoopOrder.MICRO_BATCHES_OUTER
    loading_s = _loading_s(plan, basis, prices, forward_visits(len(plan.layers), FORWARDS_AT_ONCE, order))
    read_s = basis.layout.size * plan.precision.working_dtype.itemsize / basis.profile.device_bytes_per_s
    launches_s = sum(LAUNCHES * (1 + len(work.products)) for work in basis.work) * basis.profile.launch_s
    return max(loading_s / FORWARDS_AT_ONCE, read_s, launches_s)


def _loading_s(plan: Plan, basis: CostBasis, prices: Prices, order: Sequence[Visit]) -> float:
    """Return the seconds of all uploads in these visits, or of reads from disk if they take longer."""
    loaded = [load.fragment for load in residency_of(order, basis.structure, basis.layout, plan).loads]
    itemsize, upload_s = plan.precision.working_dtype.itemsize, 0.0
    for fragment in loaded:
        if fragment.layer not in plan.hbm_layers:
            size = basis.layout.layers[fragment.layer].fragments[fragment.index].size
            op = Op("load", fragment.layer, fragment=fragment.index, num_bytes=size * itemsize)
            upload_s += prices(Stage.H2D, op)
    disk_s = read_bytes(plan, basis.layout, loaded) / basis.disk_bytes_per_s
    return max(upload_s, disk_s)


def _steady(plan: Plan, basis: CostBasis, prices: Prices) -> SimulatedStep:
    """Return the second of two simulated steps.

    A step with many micro-batches in a row is extrapolated from steps with fewer.
    """
    count = plan.step.num_micro_batches
    if plan.step.order is LoopOrder.LAYERS_OUTER or count <= PERIODS:
        return _second(plan, basis, prices)

    def with_fewer(number: int) -> SimulatedStep:
        return _second(replace(plan, step=replace(plan.step, num_micro_batches=number)), basis, prices)

    fewer, more = with_fewer(PERIODS - 1), with_fewer(PERIODS)
    num_disk_bound = _num_disk_bound(fewer, more)
    if num_disk_bound < PERIODS:
        return _extended(fewer, more, count - PERIODS)
    if num_disk_bound + 1 >= count:
        return _second(plan, basis, prices)
    return _extended(with_fewer(num_disk_bound), with_fewer(num_disk_bound + 1), count - num_disk_bound - 1)


def _num_disk_bound(fewer: SimulatedStep, more: SimulatedStep) -> int:
    """Return the number of micro-batches at which a step stops being bound by the disk.

    With fewer, one micro-batch more need not lengthen the step by all of its compute time. 0: it always does.
    """
    disk_s = fewer.busy_s.get(Stage.DISK, 0.0)
    added_s = sum(more.compute_s.values()) - sum(fewer.compute_s.values())
    if not disk_s or more.step_s - fewer.step_s >= added_s * (1 - 1e-9):
        return 0
    return math.ceil(disk_s / added_s)


def _disk_s(step: SimulatedStep, basis: CostBasis) -> float:
    """Return the seconds that the disk works in a step, including reads of working copies."""
    read_s = step.num_bytes.get(Stage.WEIGHTS, 0) / basis.disk_bytes_per_s
    return step.busy_s.get(Stage.DISK, 0.0) + read_s


def _with_disk(step: SimulatedStep, basis: CostBasis) -> SimulatedStep:
    """Return the step, lengthened if the disk needs more time than the step takes.

    In the first steps the disk may lag behind as far as slots allow, but not in the long run.
    """
    late_s = _disk_s(step, basis) - step.step_s
    if late_s <= 0:
        return step
    exposed_s = {**step.exposed_s, "optimizer": step.exposed_s.get("optimizer", 0.0) + late_s}
    return replace(step, step_s=step.step_s + late_s, exposed_s=exposed_s)


def _second(plan: Plan, basis: CostBasis, prices: Prices) -> SimulatedStep:
    simulation = Simulation(plan, basis.layout, *basis.schedule(plan), prices)
    simulation.step()
    return simulation.step()


def _extended(fewer: SimulatedStep, more: SimulatedStep, count: int) -> SimulatedStep:
    """Return the step with `count` periods more than `more`, which has one period more than `fewer`."""

    def grown(before: Mapping[Key, Number], after: Mapping[Key, Number]) -> dict[Key, Number]:
        return {key: value + count * (value - before.get(key, 0)) for key, value in after.items()}

    return SimulatedStep(
        more.step_s + count * (more.step_s - fewer.step_s),
        grown(fewer.compute_s, more.compute_s),
        grown(fewer.exposed_s, more.exposed_s),
        grown(fewer.busy_s, more.busy_s),
        grown(fewer.num_bytes, more.num_bytes),
    )
