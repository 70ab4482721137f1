"""Curves of a run, drawn with characters."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotext

# title by column
CURVES = {"loss": "loss", "eval_loss": "held-out loss", "tokens_per_s": "tokens/s", "grad_norm": "gradient norm"}
HEIGHT = 10
MAX_WIDTH = 100


def draw(rows: Sequence[Mapping[str, Any]], width: int | None = None) -> Iterator[str]:
    """Lines of a chart a column, over steps. `width`: in characters, the terminal's unless given. A column with fewer
    than two finite numbers is left out."""
    width = width or min(MAX_WIDTH, shutil.get_terminal_size().columns - 2)
    for column, title in CURVES.items():
        points = [(row["step"], row[column]) for row in rows if _finite(row.get(column))]
        if len(points) > 1:
            yield from _chart(title, points, width)


def _chart(title: str, points: Sequence[tuple[int, float]], width: int) -> list[str]:
    steps, values = zip(*points, strict=True)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, HEIGHT)
    plotext.title(title)
    plotext.plot(steps, values, marker="braille")
    plotext.xticks(_ticks(steps[0], steps[-1]))
    lines: list[str] = plotext.uncolorize(plotext.build()).splitlines()
    return [line.rstrip() for line in lines]


def _ticks(first: int, last: int) -> list[int]:
    """Whole steps, five at most."""
    return sorted({first + (last - first) * k // 4 for k in range(5)})


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
