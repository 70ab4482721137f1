"""Computes positions for rows that hold several documents."""

from __future__ import annotations

import torch


def positions_of(segments: torch.Tensor) -> torch.Tensor:
    """Return positions that begin at 0 in every segment: int64 [batch, seq_len].

    segments: [batch, seq_len], number of the document within the row, never decreasing but for pads (-1) at a row's
        end.
    """
    index = torch.arange(segments.shape[1], device=segments.device).expand(segments.shape)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values
