"""Defines the blocks of token ids that a tokenizer hands to the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.unsignedinteger[Any]]
Mask = NDArray[np.bool_]


class TokenBlock(NamedTuple):
    """Holds the ids of a document or of a part of one.

    ends: whether this is the document's last block.
    read_bytes: about how far in the file the block ends, as in TextBlock.
    supervised: true where an id counts in the loss; None: all do.
    """

    ids: TokenArray  # [num_tokens]
    ends: bool
    read_bytes: int
    supervised: Mask | None = None  # [num_tokens]
