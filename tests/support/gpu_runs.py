"""Makes runs of several GPUs, and states how far from those of one they may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.in_process import Train
from tests.support.runs import config, rows, write_config

SHAPE = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_dropout": 0.1,
}  # fmt: skip
NO_DROPOUT = {**SHAPE, "attention_dropout": 0.0}
ROUTED = {
    **NO_DROPOUT, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "output_router_logits": True, "router_aux_loss_coef": 0.1,
}  # fmt: skip
# Relative, in FP32: sums over GPUs have another order than over micro-batches, and norms come from each GPU's part.
CLOSE = 1e-6
# Muon's directions are made in bf16: where a sum's last digit rounds another way there, an element moves by 2⁻⁸ of its
# direction. Of two and of three GPUs losses differed by up to 4.5e-6 within ten steps.
CLOSE_WITH_MUON = 2e-5


def settings(run_dir: Path, num_gpus: int, **changes: Any) -> dict[str, Any]:
    """Return settings with twelve sequences an update, on any number of GPUs."""
    split = {"train__batch_size": 12, "train__micro_batch_size": 2, "train__accumulate": 6 // num_gpus}
    return config(run_dir, SHAPE, **split | {"hardware__num_gpus": num_gpus} | changes)


def trained(train: Train, run_dir: Path, num_gpus: int, **changes: Any) -> Path:
    if not train.has_processes:  # threads draw from the same random numbers
        changes = {"model__config": NO_DROPOUT, **changes}
    done = train(str(write_config(run_dir.with_suffix(".yaml"), settings(run_dir, num_gpus, **changes))))
    assert done.returncode == 0, done.stderr
    return run_dir


def held_out(run_dir: Path) -> list[float]:
    path = run_dir / "evaluations.jsonl"
    return [json.loads(line)["eval_loss"] for line in path.read_text().splitlines()] if path.exists() else []


def worst(ours: Path, theirs: Path, key: str = "loss") -> float:
    """Return the largest relative difference of a step."""
    pairs = list(zip(rows(ours), rows(theirs), strict=True))
    assert pairs
    return max(abs(a[key] / b[key] - 1) for a, b in pairs)
