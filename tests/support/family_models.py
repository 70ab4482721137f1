"""Builds tiny models of a family with the same random weights everywhere, and batches for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.model.architecture import Architecture
from tests.support.families import FAMILIES

NUM_IDS = 110  # below the ids that mean an image


def build_family(name: str, folder: Path, **changes: Any) -> Path:
    """Write a model with its own initialisation plus noise on every parameter, so that none is a constant.

    changes: settings of its configuration that replace the family's.
    """
    if name == "Zamba2" and transformers.__version__.startswith("4."):
        pytest.skip("its own save_pretrained fails in Transformers 4, as it shares tensors")
    torch.manual_seed(0)
    model = Architecture(FAMILIES[name].config | changes)(torch.float32)
    model.init_weights()  # in Transformers 4; in 5 they have their values
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # a persistent buffer, zero until somebody learned it
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def family_batches(num_batches: int, batch_size: int = 4, seq_len: int = 20) -> list[Batch]:
    """Return batches of random ids; the first targets of every batch are not supervised, and one row ends in pads."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(num_batches):
        ids = torch.randint(3, NUM_IDS, (batch_size, seq_len + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[0, :5] = -100
        targets[1, -5:] = -100
        real = torch.ones_like(targets, dtype=torch.bool)
        real[1, -4:] = False
        supervised = int((targets != -100).sum())
        tokens = batch_size * seq_len
        inputs = ids[:, :-1].contiguous()
        batches.append(Batch(inputs, targets, None, supervised, tokens, tokens * seq_len, real=real))
    return batches
