"""Makes run directories of any length, as a run would have left them, to be reported on."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.run.run_history import History
from tests.support.planned_steps import PROFILE, measured, planned
from tests.support.settings import config

CAUSES = ("h2d", "d2h", "optimizer", "host_accumulation", "loss", "data", "python")
SPIKE = 40.0  # gradient norm of one step


def row_of(step: int, num_rows: int) -> dict[str, Any]:
    """Return a step's row of metrics.

    The loss falls with a ripple, the first step compiles for a minute, and one gradient norm is a spike.
    """
    step_s = 60.0 if step == 1 else 2.0 + 0.1 * math.sin(step)
    return {
        "step": step, "loss": 2.0 + 8.0 / (1 + step) + 0.1 * math.sin(step), "lr": 1e-3 * (1 - step / (num_rows + 1)),
        "grad_norm": SPIKE if step == num_rows // 2 else 1.0 + 0.2 * math.cos(step), "tokens": 4096,
        "skipped": step == 3, "step_s": step_s, "tokens_per_s": 4096 / step_s, "model_tflops": 500 / step_s,
        "exposed_s": {cause: 0.05 * (k + 1) for k, cause in enumerate(CAUSES)},
        "hbm_peak_bytes": 3 << 30, "host_bytes": 5 << 30,
    }  # fmt: skip


def make_run(run_dir: Path, num_rows: int, reason: str | None = None, **changes: Any) -> Path:
    """Make the directory of a run that died, or that failed with `reason`.

    It has `num_rows` rows, evaluations, a spilling plan and a comparison, and a shard that was replaced.
    """
    plan = planned(PROFILE, spilled=True)
    history = History(run_dir, lambda: 1_700_000_000.0)
    with RunDir.open(config(run_dir=str(run_dir), train__steps=max(1, num_rows), **changes)) as opened:
        opened.begin(plan.to_json(), 0)
        work = measured(plan, PROFILE, slower=1.5)[-1]
        rows = ({**work, **row_of(k + 1, num_rows)} for k in range(num_rows))
        opened.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for step in range(0, num_rows + 1, max(1, num_rows // 5)):
            opened.append_evaluation(
                {"step": step, "eval_loss": 3.0 + 5.0 / (1 + step), "eval_tokens": 9, "eval_s": 1.0}
            )
    hardware = {"gpu": None, "cpu": "A <processor>", "cores": 16, "ram_bytes": 128 << 30, "load_average": 0.123456}
    surroundings = {"host": "node-3", "hardware": hardware, "versions": {"torch": "2.13.0"}}
    if reason is None:
        history.begin(0, num_rows, plan.sha256, **surroundings)
        _lose_a_shard(history)
        return run_dir
    with suppress(RuntimeError), history.of_start(0, num_rows, plan.sha256, **surroundings):
        _lose_a_shard(history)
        raise RuntimeError(reason)
    return run_dir


def _lose_a_shard(history: History) -> None:
    history.memory(3 << 30)
    history.died("optimizer shard 0", 2)
    history.replaced("optimizer shard 0", 2, 1.6)
