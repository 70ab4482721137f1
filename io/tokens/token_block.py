"""Defines the blocks of token ids that a tokenizer hands to the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.records.read_records import RecordLocation

TokenArray = NDArray[np.unsignedinteger[Any]]
Mask = NDArray[np.bool_]

IGNORED = -100  # a target, or a label of a record, that is not supervised


class TokenBlock(NamedTuple):
    """Holds the ids of a document or of a part of one.

    ends: whether this is the document's last block.
    location: of the record or file, and about how far in the file the block ends.
    supervised: true where the model must generate the token, so that it counts in the loss; None: everywhere.
    """

    ids: TokenArray  # [num_tokens]
    ends: bool
    location: RecordLocation
    supervised: Mask | None = None  # [num_tokens]
