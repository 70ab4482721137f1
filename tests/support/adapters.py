"""Makes adapters by the peft library, for models of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.reference import load_model

peft = pytest.importorskip("peft")


def build_adapter(
    folder: Path, model: Path, targets: Sequence[str], *, rank: int = 4, alpha: int = 8, dropout: float = 0.0
) -> Path:
    """Write pairs of random matrices, B's too, for the modules of these names (or ends of paths)."""
    base = load_model(model, torch.float32)
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(targets),
        init_lora_weights=False,
        fan_in_fan_out=base.config.model_type == "gpt2",
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        peft.get_peft_model(base, settings).save_pretrained(folder, save_embedding_layers=False)
    return folder
