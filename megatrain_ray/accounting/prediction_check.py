"""Compares what a plan predicted with what a run measured, term by term, and decides what is worth a warning. Pure."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import BESIDE_TENSORS, Plan
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.units import format_bytes

TIME_TOLERANCE = 0.1  # share of a step's time
BYTES_TOLERANCE = 0.05
MIN_STEPS = 3  # steps to compare at least, without a process's first step, which includes compilation
# Ray, Python and launches of small operators dominate shorter steps, and nothing predicts these.
MIN_STEP_S = 0.05
MIN_GUESSED_S = 0.5  # the same where rates are built-in ones
FAR = 4.0  # times the prediction of built-in rates: a machine differs by less from the one that they are of
# The plan estimates what processes take besides arenas. Up to half as much again has been measured.
PROCESSES_TOLERANCE = 0.5
NEWEST = 256  # number of the newest rows that are compared
# Waits of a step, by cause. The host's wait for the loss is not among them: the device computes meanwhile.
WAITS = ("h2d", "d2h", "optimizer", "host_accumulation", "data", "python")

# What the bytes of a term are, and what to do about them.
MEANINGS = {
    "HBM": "device memory: lower hardware.hbm_limit by the difference if it runs out",
    "host": "host memory: lower hardware.ram_limit by the difference if it runs out",
    "on disk": "taken of the disk of spill.path",
    "disk traffic": "read and written a step there",
    "weights read": "of the disk of spill.path, for uploads of a step",
    "activation traffic": "written to the disk of spill.path and read again in a step",
}

Rows = Sequence[Mapping[str, Any]]  # of metrics.jsonl or evaluations.jsonl


class TermKind(Enum):
    """Says what the two numbers of a term count."""

    STEP = "step"  # seconds of a whole step
    PART = "part"  # seconds of compute, or of the waits with one cause; the parts add up to the step
    WORK = "work"  # seconds in which a stage worked, whether or not other work hid them
    HELD = "held"  # bytes of memory or disk in use
    MOVED = "moved"  # bytes that a step reads from the disk and writes to it


@dataclass(frozen=True)
class Term:
    """Holds a predicted and a measured number of the same thing, in seconds or bytes."""

    name: str
    kind: TermKind
    predicted: float
    measured: float
    slack_bytes: float = 0.0  # excess that is no error: an estimate is part of it, or something is added at times

    @property
    def error(self) -> float:
        """Return predicted / measured - 1; positive if less was measured than predicted. 0 if nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else 0.0

    @property
    def error_text(self) -> str:
        """Return the error in words, as `81% too little`."""
        if abs(self.error) < 0.005:
            return "as measured"
        return f"{abs(self.error):.0%} too {'much' if self.error > 0 else 'little'}"

    @property
    def is_of_bytes(self) -> bool:
        return self.kind in (TermKind.HELD, TermKind.MOVED)

    def is_off(self, step_s: float) -> bool:
        """Return whether the numbers differ by more than the tolerance: times by a share of the measured step.

        Of bytes only an excess over the prediction counts. Terms of kind WORK are never off.
        """
        over = self.measured - self.predicted
        match self.kind:
            case TermKind.STEP | TermKind.PART:
                return abs(over) > TIME_TOLERANCE * step_s
            case TermKind.HELD | TermKind.MOVED:
                return over > max(BYTES_TOLERANCE * self.predicted, self.slack_bytes)
        return False


@dataclass(frozen=True)
class Comparison:
    """Compares a plan with the steps from `first_step` to `last_step`, all made by one process."""

    first_step: int
    last_step: int
    plan_sha256: str
    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that no run measures: rows can be changed by hand."""
        if self.step.measured <= 0 or not all(math.isfinite(term.measured) for term in self.terms):
            raise ValueError("a comparison is of a step that took time, and of finite numbers")

    def term(self, name: str) -> Term | None:
        return next((term for term in self.terms if term.name == name), None)

    @property
    def step(self) -> Term:
        return next(term for term in self.terms if term.kind is TermKind.STEP)

    @property
    def disk_rates(self) -> tuple[float, float]:
        """Return measured and predicted bytes per second, read and written, while the disk works; 0 if unused."""
        disk, traffic = self.term("disk"), self.term("disk traffic")
        if disk is None or traffic is None:
            return 0.0, 0.0
        measured = traffic.measured / disk.measured if disk.measured else 0.0
        return measured, traffic.predicted / disk.predicted if disk.predicted else 0.0

    @property
    def worst_part(self) -> Term:
        parts = (term for term in self.terms if term.kind is TermKind.PART)
        return max(parts, key=lambda term: abs(term.measured - term.predicted))

    def off(self, prediction: Prediction) -> tuple[Term, ...]:
        """Return the terms that are off: times only if steps take at least `MIN_STEP_S`.

        By built-in rates only a whole step counts, if it takes more than `FAR` times as long as predicted.
        """
        step = self.step
        timed = step.measured >= MIN_STEP_S
        if not prediction.is_measured:
            timed = step.measured >= MIN_GUESSED_S and step.measured > FAR * step.predicted
        terms = (
            term for term in self.terms if term.is_of_bytes or (timed and (prediction.is_measured or term is step))
        )
        return tuple(term for term in terms if term.is_off(step.measured))

    def __str__(self) -> str:
        step, part = self.step, self.worst_part
        return (
            f"predicted {step.predicted:.3g} s a step, measured {step.measured:.3g} (predicted {step.error_text}); "
            f"most of it in {part.name.replace('_', ' ')}: "
            f"{part.predicted:.3g} s predicted, {part.measured:.3g} measured"
        )


def compare(plan: Plan, rows: Rows, pss_bytes: int | None = None) -> Comparison | None:
    """Compare the plan's prediction with what a start of the run measured; None if there is too little to compare.

    rows: its rows of metrics, from its first step on. The newest `NEWEST` count, without the first, which compiles.
    pss_bytes: host memory of all processes of the run; None if it is not known.
    """
    usual, prediction = rows[1:][-NEWEST:], plan.prediction
    if len(usual) < MIN_STEPS or prediction is None:
        return None
    worked = usual[1:]  # the first of them tells of the first step's update
    terms = chain(
        _times(prediction, usual), _work(prediction, worked), _memory(plan, usual, pss_bytes), _disk(plan, worked)
    )
    return Comparison(rows[0]["step"], rows[-1]["step"], plan.sha256, tuple(terms))


def _times(prediction: Prediction, usual: Rows) -> Iterator[Term]:
    step_s = statistics.median(row["step_s"] for row in usual)
    yield Term("step", TermKind.STEP, prediction.step_s, step_s)
    measured = {cause: statistics.median(row["exposed_s"][cause] for row in usual) for cause in WAITS}
    expected = {cause: prediction.exposed_s.get(cause, 0.0) for cause in WAITS}
    compute = prediction.step_s - sum(expected.values()), step_s - sum(measured.values())
    yield Term("compute", TermKind.PART, *compute)
    yield from (Term(cause, TermKind.PART, expected[cause], measured[cause]) for cause in WAITS)


def _work(prediction: Prediction, rows: Rows) -> Iterator[Term]:
    if update_s := _mean(row["update_s"] for row in rows if "update_s" in row):
        yield Term("updates", TermKind.WORK, prediction.busy_s.get("optimizer", 0.0), update_s)
    if disk_s := _mean(row["disk_s"] for row in rows if "disk_s" in row):
        yield Term("disk", TermKind.WORK, prediction.disk_s, disk_s)


def _mean(values: Iterable[float]) -> float:
    """Return the mean, or 0 if there are no values. A median would leave out steps that do the work of others."""
    known = list(values)
    return statistics.fmean(known) if known else 0.0


def _memory(plan: Plan, usual: Rows, pss_bytes: int | None) -> Iterator[Term]:
    on_device = plan.total_bytes(Tier.HBM)
    if plan.device == "cuda":  # the measured peak includes only tensors
        tensors = on_device - plan.item_bytes(Tier.HBM, *BESIDE_TENSORS)
        yield Term("HBM", TermKind.HELD, tensors, max(row["hbm_peak_bytes"] for row in usual))
    if pss_bytes is not None:
        planned = plan.total_bytes(Tier.HOST) + (on_device if plan.device == "cpu" else 0)
        slack = PROCESSES_TOLERANCE * plan.item_bytes(Tier.HOST, "processes")
        yield Term("host", TermKind.HELD, planned, pss_bytes, slack)


def _disk(plan: Plan, rows: Rows) -> Iterator[Term]:
    """Yield the terms for the disk: its traffic in total and by GPU workers, and the bytes in use.

    While a save is written, shards also read what is saved, and read what was copied aside for it once more. That is at
    most as much again, and the slack of the total traffic allows for it.
    """
    on_disk = plan.total_bytes(Tier.NVME)
    moved = [row["disk_bytes"] for row in rows if "disk_bytes" in row]
    if not on_disk or not moved:
        return
    activations = plan.activation_disk_bytes
    of_saves = 2 * (on_disk - activations)
    traffic = _mean(sum(columns.values()) for columns in moved)
    yield Term("disk traffic", TermKind.MOVED, 2 * plan.written_bytes + plan.disk.weight_read_bytes, traffic, of_saves)
    if plan.weights_on_disk:
        weights = _mean(columns["weights_read"] for columns in moved)
        yield Term("weights read", TermKind.MOVED, plan.disk.weight_read_bytes, weights)
    if activations:
        both_ways = _mean(columns["activations_read"] + columns["activations_written"] for columns in moved)
        yield Term("activation traffic", TermKind.MOVED, 2 * plan.step.num_sweeps * activations, both_ways)
    yield Term("on disk", TermKind.HELD, on_disk, rows[-1]["spill_bytes"])


def warning(found: Comparison, prediction: Prediction, run_dir: object) -> str | None:
    """Return one line that names each term that is off, by how much, and what to do about it; None if none is off."""
    off = found.off(prediction)
    told = []
    if any(not term.is_of_bytes for term in off):
        told.append(f"{found}{_cause(found, prediction)}; {_advice(found, prediction, run_dir)}")
    for term in off:
        if term.is_of_bytes:
            planned, measured = format_bytes(int(term.predicted)), format_bytes(int(term.measured))
            told.append(
                f"{term.name}: planned {planned}, measured {measured} (planned {term.error_text}); "
                f"{MEANINGS[term.name]}"
            )
    return "; ".join(told) or None


def _cause(found: Comparison, prediction: Prediction) -> str:
    """Return the likely cause of a wait for the optimizer or for activations on disk, as text; empty if unknown."""
    part = found.worst_part.name
    of_activations = part in ("h2d", "d2h") and found.term("activation traffic")
    if prediction.profile is None or (part != "optimizer" and not of_activations):
        return ""
    stages = [found.term("disk"), found.term("updates") if part == "optimizer" else None]
    slower = [term for term in stages if term and term.measured > term.predicted * (1 + TIME_TOLERANCE)]
    if not slower:
        return ""
    latest = max(slower, key=lambda term: term.measured - term.predicted)
    if latest.name == "disk":
        moved, planned = (rate / 1e9 for rate in found.disk_rates)
        return f": the disk moved {moved:.2g} GB/s where the plan counts on {planned:.2g}"
    planned = prediction.profile.updates_per_s(prediction.beside_copies) / 1e9
    return f": AdamW made {planned * (1 + latest.error):.3g} Gparam/s where the plan counts on {planned:.3g}"


def _advice(found: Comparison, prediction: Prediction, run_dir: object) -> str:
    match found.worst_part.name:
        case "data":
            return "batches come too late: data.packing, longer rows or fewer sources may help, or a tokenizer's cache"
        case "python":
            return "that is Ray, the driver and what else uses its cores"
    if not prediction.is_measured:
        return "the rates are built-in ones (megatrain doctor --measure), or other processes use the cores"
    return (
        f"if the machine was busy while it was measured: megatrain doctor --measure; if it stays so, megatrain refit "
        f"{shlex.quote(str(run_dir))} FILE makes rates of what this run measured"
    )
