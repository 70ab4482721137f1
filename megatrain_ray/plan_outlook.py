"""What a plan means for a whole run, and what another machine or other settings would make of it: the end of what
`megatrain plan` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from megatrain_ray.config import TrainConfig
from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.plan_request import Machine, Request
from megatrain_ray.errors import CapacityError
from megatrain_ray.planning import Question
from megatrain_ray.units import format_bytes, format_count, format_duration

DAY_S = 24 * 60 * 60
SAME = 0.005  # a share of the speed that is no difference
ENDURANCE_BYTES = 10**15  # written, of the drive that a plan is set beside


def run_lines(config: TrainConfig, plan: Plan, price_per_hour: float | None) -> Iterator[str]:
    """How long all steps take, what that costs, what saves write, and what state that spills does."""
    if plan.prediction is None:
        return
    steps, total_s = config.train.steps, config.train.steps * plan.prediction.step_s
    price = "" if price_per_hour is None else f", {price_per_hour * total_s / 3600:.2f} at {price_per_hour:g} an hour"
    yield f"run       {steps} steps, {format_count(steps * _tokens(plan))} tokens in {format_duration(total_s)}{price}"
    if config.save_every:
        of_day = plan.save_bytes * DAY_S / (config.save_every * plan.prediction.step_s)
        yield (
            f"saves     one of {format_bytes(plan.save_bytes)} every {config.save_every} steps: "
            f"{format_bytes(int(of_day))} written a day"
        )
    if spilled := plan.written_bytes:
        of_day = spilled * DAY_S / plan.prediction.step_s
        yield (
            f"spilled   {format_bytes(spilled)} every step: {format_bytes(int(of_day))} written a day; a drive rated "
            f"for 1 PB written lasts {ENDURANCE_BYTES / of_day:.1f} days"
        )


@dataclass(frozen=True)
class Alternative:
    """`plan`: None where nothing fits."""

    change: str
    plan: Plan | None

    @property
    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        prediction = self.plan.prediction if self.plan else None
        if self.plan is None or prediction is None:
            return {"change": self.change, "fits": self.plan is not None}
        return {
            "change": self.change,
            "fits": True,
            "step_s": prediction.step_s,
            "tokens_per_s": _tokens(self.plan) / prediction.step_s,
            "model_tflops": prediction.model_tflops,
            "bottleneck": prediction.bottleneck,
        }


def alternatives(question: Question, plan: Plan) -> Iterator[Alternative]:
    """The plan itself, then each change alone."""
    yield Alternative("as it is", plan)
    for change, machine, request in _changes(question.machine, question.request):
        try:
            yield Alternative(change, replace(question, machine=machine, request=request).plan())
        except CapacityError:
            yield Alternative(change, None)


def _changes(machine: Machine, request: Request) -> Iterator[tuple[str, Machine, Request]]:
    for factor, name in ((2, "twice"), (0.5, "half")):
        ram = int(factor * machine.ram_bytes)
        yield f"{name} the RAM, {format_bytes(ram)}", replace(machine, ram_bytes=ram), request
        if machine.hbm_bytes is not None:
            hbm = int(factor * machine.hbm_bytes)
            yield f"{name} the GPU's memory, {format_bytes(hbm)}", replace(machine, hbm_bytes=hbm), request
        count = int(factor * request.num_micro_batches)
        if count == factor * request.num_micro_batches:  # an odd number has no half
            tokens = count * request.micro_batch_size * request.seq_len
            yield f"{name} the tokens a step, {tokens}", machine, replace(request, num_micro_batches=count)
    if not request.round_gradients:
        yield "train.grad_dtype=bf16", machine, replace(request, round_gradients=True)


def print_alternatives(found: Sequence[Alternative]) -> None:
    """A table; speeds beside that of the first one."""
    table = Table(box=None, pad_edge=False)
    for column in ("what if", "s a step", "tokens/s", "model TFLOPS", "bound by", ""):
        table.add_column(column, justify="left" if column in ("what if", "bound by", "") else "right")
    first = found[0].numbers
    for alternative in found:
        numbers = alternative.numbers
        if "step_s" not in numbers:
            table.add_row(alternative.change, "does not fit")
            continue
        gain = numbers["tokens_per_s"] / first["tokens_per_s"] - 1
        table.add_row(
            alternative.change,
            f"{numbers['step_s']:.3g}",
            format_count(numbers["tokens_per_s"]),
            f"{numbers['model_tflops']:.3g}",
            numbers["bottleneck"],
            f"{gain:+.0%}" if abs(gain) > SAME else "the same" if alternative is not found[0] else "",
        )
    Console().print(table)


def _tokens(plan: Plan) -> int:
    """Of a step."""
    return plan.num_micro_batches * plan.micro_batch_size * plan.seq_len
