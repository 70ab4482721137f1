"""Token ids as they pass from tokenizer to cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.unsignedinteger[Any]]
Mask = NDArray[np.bool_]


class TokenBlock(NamedTuple):
    """Ids of a document or of a part of one. `ends`: the document's last. `read_bytes`: as in TextBlock.

    `supervised`: which of the ids are learned; None: all.
    """

    ids: TokenArray  # [num_tokens]
    ends: bool
    read_bytes: int
    supervised: Mask | None = None  # [num_tokens]
