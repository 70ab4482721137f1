"""Several documents in one row: where each begins."""

from __future__ import annotations

import torch


def positions_of(segments: torch.Tensor) -> torch.Tensor:
    """Positions that begin at 0 in every segment: int64 [batch, seq_len] from segments of that shape.

    `segments`: the number of the document within the row, not falling but for pads (-1) at the end of the row.
    """
    index = torch.arange(segments.shape[1], device=segments.device).expand(segments.shape)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values
