"""What a plan predicted against what a run measured, said at its end."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain_ray.engine.prediction import Prediction
from megatrain_ray.logs import say

log = logging.getLogger(__name__)

TOLERANCE = 0.1
MIN_STEPS = 3  # that are compared; the first one of a process compiles and is not
# Waits of a step, by cause. Where the host waits for the loss the device computes: that is none of them.
WAITS = ("h2d", "d2h", "optimizer", "host_accumulation", "data", "python")


@dataclass(frozen=True)
class Comparison:
    """Seconds of a step. `term`: what differs most: compute, or the cause of a wait; and its own two numbers."""

    predicted_s: float
    measured_s: float
    term: str
    term_predicted_s: float
    term_measured_s: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured: positive when it was too slow."""
        return self.predicted_s / self.measured_s - 1

    def __str__(self) -> str:
        term = self.term.replace("_", " ")
        return (
            f"predicted {self.predicted_s:.3g} s a step, measured {self.measured_s:.3g} ({self.error:+.0%}); most of "
            f"it in {term}: {self.term_predicted_s:.3g} s predicted, {self.term_measured_s:.3g} measured"
        )


def compare(prediction: Prediction, rows: Sequence[Mapping[str, Any]]) -> Comparison | None:
    """`rows`: of the metrics of one process. None where there are too few."""
    usual = rows[1:]
    if len(usual) < MIN_STEPS:
        return None
    step_s = statistics.median(row["step_s"] for row in usual)
    waits = {cause: statistics.median(row["exposed_s"][cause] for row in usual) for cause in WAITS}
    measured = waits | {"compute": step_s - sum(waits.values())}
    expected = {cause: prediction.exposed_s.get(cause, 0.0) for cause in WAITS}
    expected["compute"] = prediction.step_s - sum(expected.values())
    term = max(measured, key=lambda name: abs(measured[name] - expected[name]))
    return Comparison(prediction.step_s, step_s, term, expected[term], measured[term])


def tell(prediction: Prediction | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """To the log; a prediction from rates of this machine that is off by more than TOLERANCE is warned of."""
    found = compare(prediction, rows) if prediction else None
    if prediction is None or found is None:
        return
    if prediction.is_measured and abs(found.error) > TOLERANCE:
        say(f"warning: {found}; if the machine was busy while it was measured: megatrain doctor --measure")
    else:
        log.info("%s", found)
