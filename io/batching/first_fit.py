"""Packs sequences into rows of a fixed capacity."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

OPEN_ROWS = 256  # rows searched for room: searching all of them would take time quadratic in their number


def first_fit(lengths: NDArray[np.integer[Any]], capacity: int) -> NDArray[np.int64]:
    """Return the row of each sequence; rows are numbered in the order they are begun.

    A sequence goes into the first row with room among the last 256 rows begun. No sequence may be longer than
    `capacity`. The result must never change, because a saved position counts rows.
    """
    room = np.full(lengths.size + 1, capacity)
    rows = np.empty(lengths.size, np.int64)
    num_rows = 0
    for index, length in enumerate(lengths.tolist()):
        oldest = max(num_rows - OPEN_ROWS, 0)
        row = oldest + int((room[oldest : num_rows + 1] >= length).argmax())  # the last one is empty, so one has room
        room[row] -= length
        rows[index] = row
        num_rows = max(num_rows, row + 1)
    return rows
