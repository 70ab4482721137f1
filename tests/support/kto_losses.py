"""Computes KTO's loss and its gradients in plain PyTorch, by the formulas of TRL 1.16's KTOTrainer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.pair_losses import document_ends


class Kto(NamedTuple):
    """Names a loss over labelled answers and its numbers."""

    kind: str
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


def kto_backward(model: Any, batch: Any, rows: slice, of: Kto, kl: float) -> list[float]:
    """Compute the gradients of one micro-batch into `.grad`; return its share of the step's loss."""
    ratios = _ratios(model, batch, rows)
    of_rows = torch.as_tensor(batch.columns["labels"])[rows].flatten()
    labels = torch.stack([of_rows[s].sum() for s in _spans(batch, rows)])
    losses = []
    for ratio, label in zip(ratios, labels.tolist(), strict=True):
        good, bad = of.beta * (ratio - kl), of.beta * (kl - ratio)
        losses.append(
            of.desirable_weight * (1 - torch.sigmoid(good)) if label > 0
            else of.undesirable_weight * (1 - torch.sigmoid(bad))
        )  # fmt: skip
    loss = torch.stack(losses).sum() / batch.num_documents
    loss.backward()
    return [loss.item()]


def kl_of(model: Any, batch: Any, micro_batch_size: int, of: Kto | None) -> float:
    """Return the estimate of KL of a step, from mismatched answers."""
    if of is None or of.kind != "kto":
        return 0.0
    model.eval()
    with torch.no_grad():
        starts = range(0, len(batch.mismatched.input_ids), micro_batch_size)
        parts = [_ratios(model, batch.mismatched, slice(start, start + micro_batch_size)) for start in starts]
    model.train()
    return float(torch.cat(parts).mean().clamp(min=0))


def _ratios(model: Any, batch: Any, rows: slice) -> Tensor:
    """Return by how much the log-probability of each document exceeds the reference's."""
    packed = {} if batch.positions is None else {"position_ids": torch.as_tensor(batch.positions)[rows]}
    logits = model(input_ids=torch.as_tensor(batch.input_ids)[rows], use_cache=False, **packed).logits.float()
    targets = torch.as_tensor(batch.targets)[rows].flatten()
    log_p = -F.cross_entropy(logits.flatten(0, 1), targets, reduction="none", ignore_index=-100)
    by_reference, spans = torch.as_tensor(batch.reference_logprobs)[rows].flatten(), _spans(batch, rows)
    return torch.stack([log_p[s].sum() for s in spans]) - torch.stack([by_reference[s].sum() for s in spans])


def _spans(batch: Any, rows: slice) -> list[slice]:
    """Return where the documents of some rows lie in the tokens of these rows."""
    positions = None if batch.positions is None else torch.as_tensor(batch.positions)[rows]
    return [slice(*ends) for ends in document_ends(positions, torch.as_tensor(batch.real)[rows])]
