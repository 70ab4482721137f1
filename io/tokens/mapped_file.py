"""Maps files of numbers into memory, so that they are read from disk when they are needed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.files.disk_errors import DiskError


def map_file(path: Path, kind: np.dtype[Any], size: int) -> NDArray[Any]:
    """Memory-map `size` elements. An empty file, which mmap refuses, gives an empty array. Raises OSError."""
    return np.memmap(path, kind, "r", shape=(size,)) if size else np.empty(0, kind)


def values_at(values: NDArray[Any], places: NDArray[np.int64]) -> NDArray[Any]:
    """Return the values at these places, copied. Raises DiskError if their file has been cut off since it was mapped.

    The rest of its last page then reads as zeros; reading more would kill the process. A deleted file stays readable.
    """
    found: NDArray[Any] = values[places]
    if isinstance(values, np.memmap):
        file = Path(str(values.filename))
        with suppress(FileNotFoundError):
            if file.stat().st_size < values.nbytes:
                raise DiskError(f"{file} has been cut off by another program; start again, and it is made anew")
    return found
