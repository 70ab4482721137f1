"""Describes what came of a call of `Trainer.train`, from the files of the run directory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_ray.run.run_dir import RunDir


@dataclass(frozen=True)
class TrainOutput:
    """Holds the result of `Trainer.train`: what Transformers' class of this name holds, and the run's rows.

    global_step: updates of the run so far, those of earlier calls included.
    training_loss: mean loss of these updates; nan if there is none.
    metrics: train_loss, train_runtime (seconds in steps), train_steps_per_second, train_samples_per_second, and the
        numbers of the newest evaluation.
    run_dir: folder of the run.
    rows: rows of metrics.jsonl of the whole run.
    evaluations: rows of evaluations.jsonl of the whole run.
    first_step: updates that this call went on from; None: there was nothing to do.
    """

    global_step: int
    training_loss: float
    metrics: Mapping[str, float]
    run_dir: Path
    rows: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    first_step: int | None

    @staticmethod
    def of(run: RunDir, step: int, first_step: int | None) -> TrainOutput:
        """Read the output of a run from its directory, after `step` updates."""
        rows, evaluations = run.rows(), run.evaluations()
        losses = [row["loss"] for row in rows if row.get("loss") is not None]
        loss = sum(losses) / len(losses) if losses else math.nan
        seconds = sum(row.get("step_s", 0.0) for row in rows)
        speed = len(rows) / seconds if seconds else math.nan
        metrics = {
            "train_loss": loss,
            "train_runtime": seconds,
            "train_steps_per_second": speed,
            "train_samples_per_second": speed * (run.config.train.batch_size or math.nan),
            **{key: value for key, value in (evaluations[-1] if evaluations else {}).items() if key != "step"},
        }
        return TrainOutput(step, loss, metrics, run.path, rows, evaluations, first_step)
