"""Which sequences share a row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

OPEN_ROWS = 256  # rows that are looked at: with all of them the time would grow with the square of their number


def first_fit(lengths: NDArray[np.integer[Any]], capacity: int) -> NDArray[np.int64]:
    """The row of each sequence, rows in the order they are begun: of the last 256 rows begun the first that has room.

    None is longer than `capacity`. The same for ever, as a saved position counts rows.
    """
    room = np.full(lengths.size + 1, capacity)
    rows = np.empty(lengths.size, np.int64)
    num_rows = 0
    for index, length in enumerate(lengths.tolist()):
        oldest = max(num_rows - OPEN_ROWS, 0)
        row = oldest + int((room[oldest : num_rows + 1] >= length).argmax())  # the last one is empty: it has room
        room[row] -= length
        rows[index] = row
        num_rows = max(num_rows, row + 1)
    return rows
