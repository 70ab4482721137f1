"""Draws the curves of a run with characters."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotext

# title of the chart of each column
CURVES = {"loss": "loss", "eval_loss": "held-out loss", "tokens_per_s": "tokens/s", "grad_norm": "gradient norm"}
HEIGHT = 11  # title, frame and steps leave seven rows, so that each of four ticks has one
MIN_WIDTH, MAX_WIDTH = 30, 100
MAX_PARTS = 7  # intervals between ticks of the step axis, at most


def draw(rows: Sequence[Mapping[str, Any]], width: int | None = None) -> Iterator[str]:
    """Yield the lines of one chart over the steps for each column with at least two finite numbers.

    rows: of metrics and evaluations.
    width: in characters; None: that of the terminal.
    """
    width = max(MIN_WIDTH, width or min(MAX_WIDTH, shutil.get_terminal_size().columns - 2))
    for column, title in CURVES.items():
        points = [(row["step"], row[column]) for row in rows if _finite(row.get(column))]
        if len(points) > 1:
            yield from _chart(title, points, width)


def _chart(title: str, points: Sequence[tuple[int, float]], width: int) -> list[str]:
    steps, values = zip(*points, strict=True)
    levels = _levels(min(values), max(values))
    labels = _labels(levels)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, HEIGHT)
    plotext.title(title)
    plotext.plot(steps, values, marker="braille")
    plotext.ylim(levels[0], levels[-1])
    plotext.yticks(levels, labels)
    plotext.xticks(_ticks(steps[0], steps[-1], width - max(map(len, labels))))
    lines: list[str] = plotext.uncolorize(plotext.build()).splitlines()
    return [line.rstrip() for line in lines]


def _levels(low: float, high: float) -> list[float]:
    """Return four levels from the lowest to the highest; for a flat line three, with the line in the middle."""
    if low == high:
        margin = (abs(low) or 1.0) / 2
        return [low - margin, low, low + margin]
    return [low + (high - low) * k / 3 for k in range(4)]


def _labels(levels: Sequence[float]) -> list[str]:
    """Return the levels as text, with one decimal more than tells them apart, below 100 at least two."""
    largest = max(map(abs, levels))
    decimals = max(1 - math.floor(math.log10((levels[-1] - levels[0]) / 3)), 2 if largest < 100 else 0)
    if decimals > 6 or largest >= 1e9:
        return [f"{level:.3e}" for level in levels]
    return [f"{level:,.{decimals}f}" for level in levels]


def _ticks(first: int, last: int, width: int) -> list[int]:
    """Return steps for ticks, evenly spaced if the range has a suitable divisor."""
    span = last - first
    most = max(1, min(MAX_PARTS, span, width // (len(str(last)) + 3) - 1))
    parts = next((n for n in range(most, 1, -1) if span % n == 0), min(most, 4))
    return [first + span * k // parts for k in range(parts + 1)]


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
