"""Computes what an evaluation must give: the plain model's log-probabilities and mean loss on held-out batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tests.support import reference
from tests.support.reference import Named, Recipe, Sequences, Weighted


def held_out_loss(folder: Path, batches: Iterable[Sequences], recipe: Recipe, masters: Named | None = None) -> float:
    """Return the mean cross-entropy over the supervised tokens of all batches, weighted by their loss weights.

    It comes from the model's own forward in evaluation mode, with whole logits.

    masters: weights that replace those of the folder.
    """
    total, total_weight = 0.0, 0.0
    for logits, t in plain_logits(folder, batches, recipe, masters):
        total += reference._objective(logits, t, Recipe(1)).item()
        total_weight += ((t[0] != -100) if t[1] is None else t[1]).double().sum().item()
    return total / total_weight


def plain_logprobs(folder: Path, batches: Iterable[Sequences], recipe: Recipe, masters: Named | None = None) -> Tensor:
    """Return the log-probability of each target of all batches in order, 1-D; 0 where a token is not supervised."""
    found = []
    for logits, (targets, _) in plain_logits(folder, batches, recipe, masters):
        values = torch.log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        found.append(values.where(targets != -100, 0.0).cpu())
    return torch.cat(found)


def plain_logits(
    folder: Path, batches: Iterable[Sequences], recipe: Recipe, masters: Named | None = None
) -> Iterator[tuple[Tensor, Weighted]]:
    """Yield the FP32 logits of each micro-batch, [tokens, V], and its targets and loss weights, [tokens] each."""
    with reference.torch_threads(recipe.num_threads), torch.no_grad():
        dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
        model = reference.load_model(folder, dtype).to(recipe.device).eval()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        masters = masters or reference._beginning(folder, recipe, model).masters
        reference._set_weights([(name, p) for name, p in model.named_parameters() if name in masters], masters)
        for batch in batches:
            inputs = batch.input_ids.to(recipe.device).split(recipe.micro_batch_size)
            targets = reference._weighted_targets(batch, len(inputs), recipe)
            packed = reference._positions(batch.positions, len(inputs), recipe)
            for i, t, p in zip(inputs, targets, packed, strict=True):
                yield model(input_ids=i, use_cache=False, **p).logits.float().flatten(0, 1), t
