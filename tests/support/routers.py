"""Builds a tiny mixture of experts that keeps its routers in FP32 whatever the type of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatrain_ray.model.architecture import Architecture
from tests.support.families import SIZES

HUNYUAN: dict[str, Any] = {
    **SIZES, "model_type": "hunyuan_v1_moe", "num_hidden_layers": 2, "num_experts": 4, "moe_topk": 2, "head_dim": 8,
}  # fmt: skip


def build_with_fp32_router(folder: Path, **changes: Any) -> Path:
    """Write the model with random FP32 weights. `changes`: settings of its configuration."""
    torch.manual_seed(0)
    model = Architecture(HUNYUAN | changes)(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder
